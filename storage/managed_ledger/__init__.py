"""Streams made of many ledgers, and the cursors that read them."""
