"""Producing: from a value of the user to its receipt."""
