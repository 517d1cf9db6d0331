"""Tests of the compaction of ordinary topics."""
