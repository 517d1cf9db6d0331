"""Connections of clients: frames to calls, answers to frames."""
