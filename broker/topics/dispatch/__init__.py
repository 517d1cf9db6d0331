"""Which consumer gets which entry: pure selection, and the shells that feed it."""
