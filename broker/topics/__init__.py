"""Topics and what hangs on them: producers, subscriptions, consumers, dispatch."""
