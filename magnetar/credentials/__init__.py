"""The credentials of a client: what its user gives, and how brokers get it.

The command line of the broker uses this package too.
"""
