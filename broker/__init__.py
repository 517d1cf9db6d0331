"""The broker: connections, topics, subscriptions, scalable topics, administration."""
