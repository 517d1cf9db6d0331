"""Durable state: metadata store, ledger store, managed ledgers and cursors."""
