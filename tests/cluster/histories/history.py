"""What clients saw of transactions on a topic: what each wrote, how it ended, what readers got.

Nothing here judges (that is `checker.py`).  Times are seconds of one monotonic clock: that of the
process which asks and reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf


class Outcome(Enum):
    """What the client knows of the end of a transaction."""

    OK = "committed"
    """The commit was answered."""
    FAILED = "aborted"
    """A commit was never asked for, or the answer says that there is none."""
    UNKNOWN = "unknown"
    """A commit was asked for and not answered."""


@dataclass(frozen=True)
class Write:
    """A message: a value that no other message of its topic has, under a key.

    `amount` is what it adds to an account.  `source` is the value that it was made of.
    """

    key: str
    value: str
    amount: int = 0
    source: str = ""


@dataclass
class Operation:
    """A transaction: what it writes, in the order of its sends, and what its client saw of it."""

    name: str
    begun_at: float
    writes: Sequence[Write]
    is_cut: bool = False
    """It writes to every key of the topic, and nobody whom it waits for is at work beside it."""
    commit_at: float = inf
    """When the commit was asked for."""
    ended_at: float = inf
    outcome: Outcome = Outcome.FAILED


@dataclass(frozen=True)
class Read:
    """A message as a reader got it."""

    key: str
    value: str
    at: float


@dataclass
class Reading:
    """Everything that a reader got, in its order, from the topic's first message on.

    One that is not `ordered` may have a segment's messages before the last ones of its parents.
    """

    reader: str
    ordered: bool
    reads: list[Read] = field(default_factory=list)
    values: set[str] = field(default_factory=set)

    def add(self, read: Read) -> None:
        """It got one more."""
        self.reads.append(read)
        self.values.add(read.value)

    def lists(self) -> Mapping[str, list[str]]:
        """The values of each key."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for read in self.reads:
            found[read.key].append(read.value)
        return found


@dataclass
class TopicHistory:
    """All transactions on a topic, and what its readers got up to the last cut."""

    topic: str
    keys: Sequence[str]
    operations: list[Operation] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def begin(
        self, actor: str, at: float, writes: Callable[[str], Sequence[Write]], *, cut: bool = False
    ) -> Operation:
        """A transaction begins; `writes` makes its messages from its name."""
        name = f"{actor}.{len(self.operations)}"
        operation = Operation(name, at, writes(name), is_cut=cut)
        self.operations.append(operation)
        return operation

    def written(self) -> Iterator[tuple[Operation, Write]]:
        """Every message, with its transaction."""
        return ((each, write) for each in self.operations for write in each.writes)
