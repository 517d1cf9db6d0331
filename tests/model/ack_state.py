"""Pure: the state that acknowledgements in transactions are modelled in.

One segment, one subscription.  Messages are bits of a mask; 3 is a cumulative acknowledgement up to
the second.  Views that an owner has of a transaction: `-` none, `l` loaded open, `o` joined, `c`
committed, `a` aborted, `v` gone, so void.
"""

from dataclasses import dataclass
from typing import NamedTuple

OPEN, COMMITTED, ABORTED, COLLECTED = "O", "C", "A", "X"
ACQUIRED, FENCING, SCANNING, READING, RUNNING, DEAD = range(6)

PUT, CHECKED, PROVED, HELD, APPLIED, FREED, UNREAD = "i", "w", "e", "k", "p", "f", "?"
"""States of an acknowledgement at its owner: its record is on its way; it is durable, and the
header is to be read; the ownership is to be proven; answered or loaded; applied in memory; its
record is to be deleted; loaded, and the header is to be read."""


class Ack(NamedTuple):
    """A request; `is_copy`: one that the network delivers late."""

    txn: int
    mask: int
    is_copy: bool


class Record(NamedTuple):
    """What is durable of an acknowledgement: one key for each writer."""

    txn: int
    mask: int
    epoch: int
    is_copy: bool


class Pending(NamedTuple):
    """What an owner knows of an acknowledgement."""

    txn: int
    mask: int
    state: str
    epoch: int
    is_copy: bool

    @property
    def record(self) -> Record:
        """Its record."""
        return Record(self.txn, self.mask, self.epoch, self.is_copy)


class Cursor(NamedTuple):
    """What is durably acknowledged, and the epoch of who fenced it last."""

    mask: int
    fence: int


class Owner(NamedTuple):
    """One incarnation; `memory`: its cursor, `durable`: what it knows to be durable of that."""

    phase: int
    view: tuple[str, ...]
    pending: tuple[Pending, ...] = ()
    memory: int = 0
    durable: int = 0


class World(NamedTuple):
    """Everything.  `answered`: of each transaction, messages whose acknowledgement was answered."""

    headers: tuple[str, ...]
    outcomes: tuple[str, ...]
    unacked: tuple[int, ...]
    failed: tuple[bool, ...]
    todo: tuple[tuple[int, ...], ...]
    net: tuple[Ack, ...]
    copies: int
    answered: tuple[int, ...]
    records: tuple[Record, ...]
    listed: tuple[bool, ...]
    owner_epoch: int
    cursor: Cursor
    owners: tuple[Owner, ...]
    seeks: int
    undone: int = 0
    """Transactions whose acknowledgements a seek has undone (bits)."""
    problem: str = ""


@dataclass(frozen=True)
class Acking:
    """What happens in a run; `plan`: the acknowledgements of each transaction."""

    plan: tuple[tuple[int, ...], ...] = ((1,), (1,))
    owners: int = 2
    copies: int = 0
    seeks: int = 0
    judges_delivery: bool = True
    """That nothing is delivered whose acknowledgement was answered is asked in each state."""
    reads_header: bool = True
    """An owner reads the header when the first record of a transaction is durable."""
    broken: frozenset[str] = frozenset()
