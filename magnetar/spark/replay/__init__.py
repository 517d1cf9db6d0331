"""The replay: a range of a topic, filtered and projected, into another topic, exactly once."""
