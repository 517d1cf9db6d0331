"""Measurements: side by side with Apache Pulsar (`python -m bench`), and of choices of our own."""
