"""The compaction: of a topic up to a cut, the last row of each key, as a new topic."""
