"""Transactions in a broker: its coordinators, watches of their leaders, joining of topics."""
