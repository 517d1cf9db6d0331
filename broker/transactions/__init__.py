"""What of transactions a broker serves: coordinators, joining, watches."""
