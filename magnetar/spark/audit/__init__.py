"""The audit: compares the entries of a topic with its transactions, producers and queries."""
