"""Transactions: who coordinates them, their life, and the keys that fence them."""
