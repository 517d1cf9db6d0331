"""Pure: the state that writes in transactions are modelled in.

Views that an owner has of a transaction: `-` none, `l` loaded open, `J` and `K` claim durable (`K`:
one was loaded) and the header to be read, `o` joined, `r` refused (the own claim is to be deleted),
`c` committed, `a` aborted, `b` aborted and recorded; while it loads `?` found by the scan, `x`
found without header.  Where a rule is taken out also `h`, header read before the claim, `p`, append
issued before the claim, and `d`, claims deleted before the abort is recorded.
"""

from dataclasses import dataclass
from typing import NamedTuple

OPEN, COMMITTED, ABORTED, COLLECTED = "O", "C", "A", "X"
FREE = 99
"""A pin that holds nothing back; a log that has no limit."""
TO_READ, TO_PUT, TO_READ_AGAIN, ADDED, NOT_ADDED = "r", "p", "a", "+", "-"
"""Where a coordinator is that adds a segment to a transaction."""
ACQUIRED, FENCED, SCANNED, READ, RUNNING, DEAD = range(6)


class Claim(NamedTuple):
    """Of a transaction, by the owner of that epoch, made when `floor` was the last one issued."""

    txn: int
    segment: int
    epoch: int
    floor: int


class Append(NamedTuple):
    """A message on its way into the log; `is_copy`: one that the network delivers late."""

    txn: int
    is_copy: bool


class Entry(NamedTuple):
    """A message in the log.  Positions are epoch * 8 + index."""

    position: int
    txn: int
    is_copy: bool


class Sends(NamedTuple):
    """Requests on their way to a segment's owner: sent by the client, delivered once more."""

    real: int = 0
    copies: int = 0

    def without(self, *, is_copy: bool) -> "Sends":
        """One of them fewer."""
        return Sends(self.real - (not is_copy), self.copies - is_copy)

    def plus(self, *, is_copy: bool) -> "Sends":
        """One of them more."""
        return Sends(self.real + (not is_copy), self.copies + is_copy)


class Owner(NamedTuple):
    """One incarnation.  Of each transaction: view, epochs of the claims it knows (bits), pin."""

    phase: int
    view: tuple[str, ...]
    keys: tuple[int, ...]
    pins: tuple[int, ...]
    inflight: tuple[Append, ...] = ()
    confirmed: int = 0
    limit: int = FREE
    skips: int = 0
    early: tuple[tuple[int, ...], ...] = ()
    """What a load that lacks a rule has read too early."""


class Segment(NamedTuple):
    """A log with its fence, what is recorded of it, and everyone who owned it."""

    log: tuple[Entry, ...]
    fence: int
    is_sealed: bool
    aborted: tuple[int, ...]
    watermark: int
    owners: tuple[Owner, ...]

    def end(self, owner: Owner) -> int:
        """The last position that this owner knows to be durable."""
        return self.log[owner.confirmed - 1].position if owner.confirmed else 0

    def horizon(self, owner: Owner) -> int:
        """Up to where that owner delivers."""
        horizon = self.end(owner)
        for view, pin in zip(owner.view, owner.pins, strict=True):
            if pin < horizon and view in "lKop":
                horizon = pin
        return horizon


class World(NamedTuple):
    """Everything.  `outcomes`: how each transaction has ended, whatever is left that tells."""

    headers: tuple[str, ...]
    outcomes: tuple[str, ...]
    unacked: tuple[int, ...]
    failed: tuple[bool, ...]
    todo: tuple[tuple[int, ...], ...]
    net: tuple[tuple[Sends, ...], ...]
    copies: int
    claims: tuple[Claim, ...]
    listed: tuple[bool, ...]
    segments: tuple[Segment, ...]
    added: tuple[tuple[str, ...], ...] = ()
    """Where a coordinator puts claims: how far it is, of each transaction and segment."""


@dataclass(frozen=True)
class Writing:
    """What happens in a run."""

    txns: int = 1
    segments: int = 1
    owners: int = 2
    sends: int = 1
    copies: int = 1
    """Requests that the network may deliver once more."""
    seals: bool = False
    """The first segment may be sealed; what comes then goes to the second one."""
    crashes: bool = True
    keeps_stale: bool = True
    """A segment may be taken from an owner that still runs."""
    watermark: bool = False
    """The horizon is made durable, and is where a load pins; else the floors of claims are."""
    by_coordinator: bool = False
    """The coordinator puts claims, at ADD_PARTITION, without epoch and floor; the owner none."""
    prunes: bool = True
    """That something speaks for each aborted entry is asked."""
    broken: frozenset[str] = frozenset()


def fresh_owner(txns: int, phase: int) -> Owner:
    """One that knows nothing."""
    return Owner(phase, ("-",) * txns, (0,) * txns, (FREE,) * txns)
