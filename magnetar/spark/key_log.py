"""The messages of a transaction key in a state topic, and the state that follows from them.

Where brokers have no transaction keys the state of a key is a log: messages under the key's name in
a topic of one segment.  Pure: messages to and from JSON, their fold, and the next step.  Rules:

- L1 A message that can be read is final, and so are all before it: brokers show nothing behind an
  open transaction.  So a writer that has read its own message knows all messages before it.
- L2 An opener reads up to its `open`, and aborts every transaction that has an intent before it and
  no record.  The coordinator decides between that abort and a commit: if the commit came first, the
  record is in the topic by then, and the opener reads it, up to a `mark`.
- L3 A driver writes its intent before it decides anything, reads up to it, and goes on only if
  nobody has opened the key since the driver's own opening: then it writes the record and asks for
  the commit.  Transactions of other intents of its epoch without a record it aborts first (L2).
- L4 A record that can be read was committed with the rows that are in its transaction.
- L5 A message whose receipt was lost may be in the topic twice, the second time behind others: the
  second one changes nothing.
- L6 A reader that continues begins with the last message that it knows, and must find it unchanged.
  Otherwise the topic was made anew, and its epochs say nothing about the known ones.

So two live drivers cannot both commit a batch.  An `open` and an intent have an order.  If the open
is first, the driver reads it and commits nothing.  If the intent is first, the opener reads it and
has its transaction aborted, or learns what it committed.  Of two intents of one epoch, the later
one does the same with the earlier one.  An exclusive producer would not do instead: a broker may
store its messages behind the first one of its successor, and queries with different keys would
fence each other.
"""

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from magnetar import GroupRecord
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.errors import StateUnreadable

__all__ = [
    "ANY_EPOCH",
    "NOWHERE",
    "Entry",
    "EntryKind",
    "KeyState",
    "MessagePlace",
    "Verdict",
    "MessageRef",
    "digest_of",
    "entry_of",
    "text_of",
]

VERSION: Final = 1
ANY_EPOCH: Final = -1
EARLIER_QUERIES: Final = 8
"""Number of queries whose last batch is remembered, beside the last query."""
KNOWN_OPENERS: Final = 8
"""Number of openers that are remembered: an `open` may come twice (L5)."""
DIGEST_BYTES: Final = 16
MessagePlace = tuple[int, int]
"""Ledger and entry of a message."""
NOWHERE: Final[MessagePlace] = (-1, -1)


class EntryKind(enum.StrEnum):
    """The kinds of messages in a key's log."""

    OPEN = "open"
    """Opens the key, which raises the epoch, unless the opener expects another epoch."""
    STATE = "state"
    """The state that an opener found: the epoch, and the last batch of each query."""
    INTENT = "intent"
    """A driver of an epoch is about to commit a transaction."""
    RECORD = "record"
    """Query, batch and positions of a commit, written in its transaction."""
    MARK = "mark"
    """Nothing; when it can be read, all messages before it are final."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message.

    `nonce` names its writer.  `epoch` of an `open` is the one that it expects.  `batches` has the
    last batch of each query, the latest query last; `openers` the nonces of the last openers.
    `timeout_ms` of an `intent` is the timeout of its transaction; None: not known.
    """

    kind: EntryKind
    nonce: str
    epoch: int = ANY_EPOCH
    txn: TxnId | None = None
    last: GroupRecord | None = None
    batches: Mapping[str, int] = field(default_factory=dict)
    openers: tuple[str, ...] = ()
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class MessageRef:
    """A message of the topic: its place, and the digest of its value (L6)."""

    place: MessagePlace
    digest: str

    def __str__(self) -> str:
        """The text of this reference in options: `4:17:9f...`."""
        return f"{self.place[0]}:{self.place[1]}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> "MessageRef":
        """Parse the text that `str` returns.  Raises `ValueError`."""
        ledger, entry, digest = text.split(":")
        if not (ledger.isdecimal() and entry.isdecimal() and len(digest) == 2 * DIGEST_BYTES):
            raise ValueError(f"{text!r} is no place of a message")
        return cls((int(ledger), int(entry)), digest)


class Verdict(enum.Enum):
    """The next step for a batch whose intent can be read (L3)."""

    WRITE = enum.auto()
    """Write the record and commit."""
    DONE = enum.auto()
    """The batch was committed before: abort."""
    DIFFERS = enum.auto()
    """A batch of its number was committed with other positions: abort and raise."""
    FENCED = enum.auto()
    """The key was opened since: abort and raise."""
    UNKNOWN = enum.auto()
    """The topic has lost the epoch of the driver: abort and raise."""


@dataclass(frozen=True, slots=True)
class KeyState:
    """The state of a key: the fold of its messages up to a place.

    `pending`: intents without a record, of this epoch (or of a later one, where the log has lost
    its beginning), and of the one before until its opener has written its state (`begun`).
    """

    epoch: int = ANY_EPOCH
    openers: tuple[str, ...] = ()
    last: GroupRecord | None = None
    batches: Mapping[str, int] = field(default_factory=dict)
    pending: tuple[TxnId, ...] = ()
    begun: bool = False

    @property
    def opener(self) -> str | None:
        """The nonce of the last opener."""
        return self.openers[-1] if self.openers else None

    def after(self, entry: Entry) -> "KeyState":
        """The state after one more message."""
        match entry.kind:
            case EntryKind.OPEN:
                return self._after_open(entry)
            case EntryKind.STATE:
                return self._after_state(entry)
            case EntryKind.INTENT if entry.txn is not None and entry.epoch >= self.epoch:
                return replace(self, pending=(*_without(self.pending, entry.txn), entry.txn))
            case EntryKind.RECORD if entry.last is not None and entry.txn is not None:
                return self._after_record(entry.last, entry.txn)
            case _:
                return self

    def verdict(self, epoch: int, query: str, batch: int, positions: str | None) -> Verdict:
        """The verdict on a batch that a driver of that epoch wants to commit (L3)."""
        if self.epoch != epoch:
            return Verdict.FENCED if self.epoch > epoch else Verdict.UNKNOWN
        if batch > self.batches.get(query, -1):
            return Verdict.WRITE
        last = self.last
        same = last is not None and (last.query, last.batch) == (query, batch)
        if same and last is not None and None not in (positions, last.positions):
            return Verdict.DONE if positions == last.positions else Verdict.DIFFERS
        return Verdict.DONE

    def state_entry(self, nonce: str) -> Entry:
        """The `state` message that whoever opens the key writes."""
        return Entry(
            EntryKind.STATE,
            nonce,
            self.epoch,
            last=self.last,
            batches=self.batches,
            openers=self.openers,
        )

    def _after_open(self, entry: Entry) -> "KeyState":
        again = entry.nonce in self.openers  # L5
        if again or entry.epoch not in (ANY_EPOCH, self.epoch):
            return self
        openers = (*self.openers, entry.nonce)[-KNOWN_OPENERS:]
        return replace(self, epoch=self.epoch + 1, openers=openers, begun=False)

    def _after_state(self, entry: Entry) -> "KeyState":
        if self.epoch == ANY_EPOCH:  # the log is read from here on
            return KeyState(entry.epoch, entry.openers, entry.last, dict(entry.batches), begun=True)
        if entry.nonce == self.opener and not self.begun:
            return replace(self, pending=(), begun=True)
        return self

    def _after_record(self, record: GroupRecord, txn: TxnId) -> "KeyState":
        pending = _without(self.pending, txn)
        if record.batch <= self.batches.get(record.query, -1):  # L5
            return replace(self, pending=pending)
        batches = {q: n for q, n in self.batches.items() if q != record.query}
        batches = dict(list(batches.items())[-EARLIER_QUERIES:]) | {record.query: record.batch}
        return replace(self, last=record, batches=batches, pending=pending)


def _without(pending: Iterable[TxnId], txn: TxnId) -> tuple[TxnId, ...]:
    return tuple(each for each in pending if each != txn)


def text_of(entry: Entry) -> str:
    """The JSON of an entry; equal entries have equal texts."""
    document: dict[str, object] = {
        "v": VERSION,
        "kind": entry.kind.value,
        "nonce": entry.nonce,
        "epoch": entry.epoch,
    }
    if entry.txn is not None:
        document["txn"] = str(entry.txn)
    if entry.timeout_ms is not None:
        document["timeoutMs"] = entry.timeout_ms
    if entry.last is not None:
        last = entry.last
        record: dict[str, object] = {"query": last.query, "batch": last.batch}
        if last.positions is not None:
            record["positions"] = last.positions
        if last.group is not None:
            record["txn"] = str(last.group)
        document["last"] = record
    if entry.openers:
        document["openers"] = list(entry.openers)
    if entry.batches:
        document["batches"] = [[query, batch] for query, batch in entry.batches.items()]
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def entry_of(text: bytes) -> Entry:
    """Read the entry of a message's value.  Raises `StateUnreadable`."""
    try:
        document = json.loads(text)
        if document["v"] != VERSION:
            raise ValueError(f"it is of version {document['v']}")
        return Entry(
            EntryKind(document["kind"]),
            str(document["nonce"]),
            int(document["epoch"]),
            TxnId.parse(document["txn"]) if "txn" in document else None,
            _record_of(document["last"]) if "last" in document else None,
            {str(query): int(batch) for query, batch in document.get("batches", ())},
            tuple(map(str, document.get("openers", ()))),
            int(document["timeoutMs"]) if "timeoutMs" in document else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateUnreadable(
            f"A message of the state topic is none of this version of the connector ({error!r}): "
            f"{text[:100]!r}. Give the option stateTopic a topic that nobody else writes to, or "
            "use the version that has written it."
        ) from error


def digest_of(value: bytes) -> str:
    """The digest that identifies a message (L6); each message has the nonce of its writer."""
    return hashlib.blake2b(value, digest_size=DIGEST_BYTES).hexdigest()


def _record_of(document: Mapping[str, object]) -> GroupRecord:
    positions = document.get("positions")
    return GroupRecord(
        str(document["query"]),
        int(str(document["batch"])),
        None if positions is None else str(positions),
        TxnId.parse(str(document["txn"])) if "txn" in document else None,
    )
