"""Geo-replication: what this cluster sends to others."""
