"""Costs of one large topic: time, memory and files, with exponents."""
