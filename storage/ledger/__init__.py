"""The ledger store: one interface and its backends."""
