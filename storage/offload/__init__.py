"""Copies of ended ledgers, in a directory or an object store: docs/decisions/offload-format.md."""
