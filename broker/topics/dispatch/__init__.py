"""Dispatchers, which send the entries of a subscription to its consumers."""
