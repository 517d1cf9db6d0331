"""Transactions of the client: their coordinators, states and keys."""
