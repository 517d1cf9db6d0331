"""Connections of the client to brokers, and attachments that survive their loss."""
