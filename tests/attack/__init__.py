"""Attacks on a live broker beside a probe; `make attack` runs them (docs/testing.md)."""
