"""The metadata store: one interface and its backends."""
