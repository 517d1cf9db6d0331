"""The Pulsar binary protocol, sans-IO: no sockets, clock or randomness."""
