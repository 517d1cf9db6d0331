"""The audit: whether what a topic holds is what its transactions, producers and queries say."""
