"""The container image, really built and really run."""
