"""Pure: the state that consumers in order (Exclusive, Failover, stream) are modelled in.

One segment, one subscription, one active consumer, and cumulative acknowledgements.  Entries are
numbered from 1, sets of them are bits.  What `acks` shows is taken for granted: an acknowledgement
that is taken is durable, a load finds what is held.  What is new: the owner hears of an end late,
when the client has its answer already; and what is on the wire, both ways, each in order.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

OPEN, COMMITTED, ABORTED = "O", "C", "A"

NEW, SENT, DOOMED, HELD, LOST, COMMIT_TOLD, ABORT_TOLD = "n", "a", "D", "k", "x", "c", "r"
"""What a client knows of a transaction: not begun; its acknowledgement is sent; so, and it must be
aborted; the acknowledgement is answered; it must be aborted; it is told committed, or aborted."""

NOBODY = -1
"""Whose a hold is that a load has found, unless its record says it."""


class Client(NamedTuple):
    """The active consumer.  `hand`: entries that came and were acknowledged in nothing yet."""

    who: int = 0
    epoch: int = 0
    hand: int = 0
    last: int = 0
    furthest: int = 0
    """Kept by a careful client only."""


class Redeliver(NamedTuple):
    """Asked by a client that drops what it has.  `kind`: what is on the wire differs by it."""

    epoch: int
    kind: str = "redeliver"


class AckInTxn(NamedTuple):
    """Of all up to `upto`; `alone`: every earlier transaction of the client was answered."""

    txn: int
    upto: int
    alone: bool


class PlainAck(NamedTuple):
    """Of all up to `upto`."""

    upto: int
    kind: str = "plain"


class Message(NamedTuple):
    """An entry, sent under a redelivery epoch."""

    entry: int
    epoch: int
    kind: str = "message"


class Answer(NamedTuple):
    """To an acknowledgement."""

    is_taken: bool
    txn: int
    kind: str = "answer"


class Hold(NamedTuple):
    """Entries that a transaction acknowledges, and whose consumer's it is."""

    txn: int
    entries: int
    who: int


class Owner(NamedTuple):
    """The segment's owner: the cursor, what is held, where it sends on."""

    cursor: int = 0
    holds: tuple[Hold, ...] = ()
    next: int = 0
    epoch: int = 0
    passed: int = 0
    """Entries passed over as held, or released, and not sent since."""
    released: int = 0
    """Released by an abort when they or later ones had been sent; no redelivery asked since."""
    read: int = 0
    """Transactions whose header was read open since the last rewind (bits)."""
    furthest: int = 0
    """The furthest entry sent since then, or since the consumer attached."""


class Left(NamedTuple):
    """How often each may still happen."""

    plain: int = 0
    cut: int = 0
    load: int = 0
    failover: int = 0
    seek: int = 0
    deadline: int = 0


class World(NamedTuple):
    """Everything.  `within`: what was processed in each transaction; `done`: in what lasts."""

    headers: tuple[str, ...]
    known: tuple[str, ...]
    within: tuple[int, ...]
    of: tuple[int, ...]
    done: int
    client: Client
    up: tuple[Redeliver | AckInTxn | PlainAck, ...]
    down: tuple[Message | Answer, ...]
    owner: Owner
    left: Left
    problem: str = ""


NOTHING_MORE = Left()


class Habit(Enum):
    """What a client does about aborts and what comes unasked."""

    STOCK = "drops what it has and asks for redelivery after an abort that it knows of"
    CAREFUL = "... and when an earlier entry comes again; nothing open commits then"
    DEAF = "never asks"


RULES = frozenset({"A8-pass", "A8-refuse", "A8-seek", "A9", "A9-cumulative"})


@dataclass(frozen=True)
class Ordering:
    """What happens in a run.

    `rules`: RULES, and what could be had instead, or beside them:
    - `none`: nothing is delivered behind any hold;
    - `sent`: no acknowledgement covers what was passed over or released, and not sent since;
    - `A10`: none in a transaction covers what an abort released, until redelivery is asked;
    - `A10-plain`: a plain one is shortened so that it does not, either;
    - `record-who`: the record of a hold says whose it is;
    and what is wrong: `cached`, a header that was read before the rewind is good enough;
    `loaded-own`, a hold that a load finds is taken for the active consumer's.
    """

    entries: int = 2
    txns: int = 2
    habit: Habit = Habit.STOCK
    single_first: bool = False
    """The first transaction acknowledges one entry only, not all up to it."""
    pipelines: bool = False
    """Acknowledges in the next transaction before the one before has ended."""
    batches: bool = False
    """Ends a transaction only when all entries have come."""
    has_epochs: bool = True
    """Messages of older redelivery epochs are dropped."""
    left: Left = NOTHING_MORE
    judges: str = "all"
    """`all`, or only `loss`, or only `conflict`."""
    rules: frozenset[str] = RULES
