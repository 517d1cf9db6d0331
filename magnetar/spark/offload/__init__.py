"""The offload: sealed segments as raw copies and as a table for other engines."""
