"""Tenants and namespaces, and what they prescribe."""
