"""What could be observed in a run, in the order in which it happened.

Nothing here judges (that is `checker.py`); nothing here changes what happens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

Txn = tuple[int, int]
"""Most and least bits."""
Place = tuple[int, ...]
"""Ledger and entry; of a message of a batch also its index there."""


@dataclass(slots=True)
class Message:
    """One message of a workload, sent once or (its outcome unknown) several times."""

    name: str
    topic: str
    key: str
    producer: str
    number: int
    """Rises for each producer."""
    awaited: bool
    """Whether the producer waited for the outcome before it sent the next one."""
    txn: Txn | None = None
    once: bool = False
    """Whether it must not be stored twice, on whatever segments."""
    sends: int = 0
    receipt_at: float | None = None
    refused: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Delivered:
    """One message as one consumer got it.  `written_at`: when the broker gave it to the network.

    `position`: ledger and entry, and the place in its batch if it came in one.
    """

    subscription: str
    message: str
    segment: str
    position: Place
    consumer: str
    at: float
    written_at: float
    redeliveries: int
    stale: bool = False
    """By a broker that had been replaced, or whose segment another one had taken: it may show again
    what its successor has done with."""
    attachment: int = 0
    """The number of the attachment to the segment: a new one each time that a consumer attaches."""
    returned: bool = False
    """Whether the consumer has asked for it again."""


@dataclass(slots=True)
class Acked:
    """One acknowledgement of one delivery."""

    subscription: str
    message: str
    segment: str
    position: Place
    consumer: str
    at: float
    txn: Txn | None = None
    answered_at: float | None = None
    """When the broker said that it is durable."""
    error: str | None = None


@dataclass(slots=True)
class Sought:
    """One SEEK: from `target` on everything is delivered again."""

    subscription: str
    segment: str
    target: Place
    at: float
    answered_at: float | None = None

    def undoes(self, position: Place, since: float) -> bool:
        """Whether it may undo an acknowledgement of that position, made at `since` or later."""
        unknown = self.answered_at is None
        return position >= self.target and (unknown or since <= (self.answered_at or 0))


@dataclass(slots=True)
class Transaction:
    """A transaction as its client saw it."""

    txn: Txn
    begun_at: float
    timeout_ms: int
    key: tuple[str, int] | None = None
    """The transaction key and the epoch that it was begun under."""
    asked: list[str] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)
    """(action, "" or the error)."""


@dataclass(frozen=True, slots=True)
class KeyOpened:
    """An OPEN of a transaction key as it was answered, and when that came."""

    key: str
    epoch: int
    who: str
    at: float
    last: Txn | None
    last_committed: bool | None
    told: tuple[str, int] | None = None
    """Query and batch of the last group that committed."""


@dataclass(frozen=True, slots=True)
class GroupCommitted:
    """What the metadata service made of a group: the truth about its attempts."""

    at: float
    key: str
    epoch: int
    group: Txn
    batch: tuple[str, int]
    winners: frozenset[int]


@dataclass(slots=True)
class GroupAsked:
    """A group as its driver saw it."""

    nonce: str
    group: Txn
    attempts: list[Txn] = field(default_factory=list)
    winners: frozenset[int] | None = None
    """That a commit named."""


@dataclass(slots=True)
class HeaderChange:
    """What the metadata service made of a header: the truth about a transaction."""

    at: float
    state: str | None


class History:
    """See the module's rules."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self.messages: dict[str, Message] = {}
        self.deliveries: list[Delivered] = []
        self.acks: list[Acked] = []
        self.seeks: list[Sought] = []
        self.transactions: dict[Txn, Transaction] = {}
        self.headers: dict[Txn, list[HeaderChange]] = {}
        self.openings: list[KeyOpened] = []
        self.groups: list[GroupAsked] = []
        self.commits: dict[Txn, GroupCommitted] = {}
        """Of each group, in their order."""
        self.told_done: list[tuple[str, tuple[str, int], float]] = []
        """Who was told that which batch is committed, and when."""
        self.owners: dict[str, list[tuple[float, str]]] = {}
        """Of each segment: when which broker took its epoch, or proved that it has it."""
        self.partitions: dict[str, list[str]] = {}
        """Of each scalable topic that begins as a partitioned one."""
        self.unstamped: set[str] = set()
        """Segments to which batches without entry hashes were sent."""
        self.attachments = 0
        """How many consumers have attached to segments."""
        self.violations: list[str] = []
        self.lines: list[str] = []
        self.keep_lines = False
        self.on_line: Callable[[str], None] = lambda line: None

    def note(self, who: str, what: str) -> None:
        """One line of the trace."""
        line = f"{self._time():12.6f} {who:14} {what}"
        self.on_line(line)
        if self.keep_lines:
            self.lines.append(line)

    def owned(self, segment: str, broker: str) -> None:
        """That broker wrote the record of the segment's owner."""
        self.owners.setdefault(segment, []).append((self._time(), broker))

    def was_owner(self, segment: str, broker: str, at: float) -> bool:
        """Whether that broker owned it once, and another one has taken it since."""
        takers = [taker for when, taker in self.owners.get(segment, ()) if when <= at]
        return broker in takers and takers[-1] != broker

    def violated(self, sentence: str) -> None:
        """Something that must never be, seen at once."""
        self.note("VIOLATION", sentence)
        self.violations.append(f"at {self._time():.6f} s: {sentence}")

    def sending(self, message: Message) -> None:
        self.messages.setdefault(message.name, message)
        message.sends += 1
        self.note(message.producer, f"send {message.name} key={message.key} txn={message.txn}")

    def receipt(self, message: Message, segment: str, position: tuple[int, int]) -> None:
        if message.receipt_at is None:
            message.receipt_at = self._time()
        self.note(message.producer, f"receipt {message.name} {segment} {position}")

    def refused(self, message: Message, error: str) -> None:
        message.refused.append(error)
        self.note(message.producer, f"no receipt {message.name}: {error}")

    def delivered(self, delivery: Delivered) -> None:
        self.deliveries.append(delivery)
        self.note(
            delivery.consumer,
            f"got {delivery.message} {delivery.segment} {delivery.position} "
            f"for {delivery.subscription} redelivered={delivery.redeliveries}",
        )

    def returned(self, attachment: int) -> None:
        """A consumer asks for everything again that it has not acknowledged."""
        for each in self.deliveries:
            each.returned |= each.attachment == attachment

    def acking(self, delivery: Delivered, txn: Txn | None) -> Acked:
        ack = Acked(
            delivery.subscription,
            delivery.message,
            delivery.segment,
            delivery.position,
            delivery.consumer,
            self._time(),
            txn,
        )
        self.acks.append(ack)
        self.note(delivery.consumer, f"ack {delivery.message} {delivery.position} txn={txn}")
        return ack

    def ack_answered(self, ack: Acked, error: str | None) -> None:
        if error is None:
            ack.answered_at = self._time()
        else:
            ack.error = error
        self.note(ack.consumer, f"ack of {ack.message} answered: {error or 'durable'}")

    def seeking(self, who: str, subscription: str, segment: str, target: Place) -> Sought:
        sought = Sought(subscription, segment, target, self._time())
        self.seeks.append(sought)
        self.note(who, f"seek {subscription} {segment} to {target}")
        return sought

    def seek_answered(self, who: str, sought: Sought) -> None:
        sought.answered_at = self._time()
        self.note(who, f"seek of {sought.subscription} to {sought.target} answered")

    def key_opened(self, opened: KeyOpened) -> None:
        self.openings.append(opened)
        self.note(opened.who, f"has epoch {opened.epoch}, last {opened.last}")

    def header_changed(self, txn: Txn, state: str | None) -> None:
        self.headers.setdefault(txn, []).append(HeaderChange(self._time(), state))
        self.note("metadata", f"header of {txn}: {state}")

    def group_committed(self, made: GroupCommitted) -> None:
        self.commits.setdefault(made.group, made)
        self.note("metadata", f"{made.group} commits {made.batch} with {sorted(made.winners)}")

    def batch_done(self, who: str, batch: tuple[str, int]) -> None:
        self.told_done.append((who, batch, self._time()))
        self.note(who, f"is told that {batch} is committed")
