"""Connections of the client: who it asks, how it gets there, and how it comes back."""
