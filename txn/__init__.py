"""Transactions whose state lives in the metadata store."""
