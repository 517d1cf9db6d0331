"""Command handlers, one module for each area of the protocol."""
