"""Topics with their producers, subscriptions, consumers and dispatchers."""
