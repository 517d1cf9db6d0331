"""Compaction of ordinary topics: of each key the newest message (docs/decisions/compaction.md)."""
