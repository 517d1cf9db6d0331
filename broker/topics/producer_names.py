"""Generated names for producers that bring none.

They are unique for ever: cluster, a number that each start of a broker draws from the metadata
store, a counter.
"""

from storage.metadata.store import ABSENT, MetadataStore, VersionConflict

NAME_COUNTER_KEY = "/counters/producer-name"


class ProducerNames:
    """Makes producer names that no producer ever had."""

    def __init__(self, cluster: str, start: int) -> None:
        self._prefix = f"{cluster}-{start}-"
        self._next = 0

    @classmethod
    async def open(cls, metadata: MetadataStore, cluster: str) -> "ProducerNames":
        """Draw the number of this start."""
        while True:
            record = await metadata.get(NAME_COUNTER_KEY)
            start = int(record.value) + 1 if record is not None else 0
            expect = record.version if record is not None else ABSENT
            try:
                await metadata.put(NAME_COUNTER_KEY, str(start).encode(), expect=expect)
            except VersionConflict:
                continue
            return cls(cluster, start)

    def next(self) -> str:
        """A new name."""
        name = f"{self._prefix}{self._next}"
        self._next += 1
        return name
