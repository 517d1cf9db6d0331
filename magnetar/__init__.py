"""The Python client for Pulsar v5 brokers."""
