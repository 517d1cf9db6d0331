"""The administrative REST interface."""
