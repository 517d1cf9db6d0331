"""The Pulsar wire, sans-IO: bytes in, values out, and back.  No sockets, clock or randomness."""
