"""Consuming: segments, and the consumers of topics and namespaces that stand on them."""
