"""Tenants, namespaces and their policies; compatibility of schemas."""
