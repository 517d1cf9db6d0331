"""BookKeeper's own Java client, for tests that compare or mix it with the project's."""
