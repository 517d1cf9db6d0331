"""Typed settings, and the bounds of every queue, cache and retry in one place."""
