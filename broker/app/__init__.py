"""The process: makes a broker's parts, connects them, starts and stops them."""
