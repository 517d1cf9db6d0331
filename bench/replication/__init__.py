"""Geo-replication beside other ways of bringing a topic to another cluster."""
