"""The embedded ledger store: one shared append-only log for all ledgers of a process."""
