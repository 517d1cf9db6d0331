"""The stored form of transactions: paths, JSON and indexes (PIP-473; claims and epochs are ours).
Pure.

    /txn/id/<txn>                                     header: state, deadline, owner
    /txn/op/<txn>/w:<seg>:<epoch>                     claim: one writer's entries on one segment
    /txn/op/<txn>/a:<seg>:<sub>:<epoch>:<number>      acknowledgements of one ACK command
    /txn/op/<group>/w:<seg>:<epoch>:<attempt>         the same of an attempt, by its index
    /txn/op/<group>/a:<seg>:<sub>:<epoch>:<number>:<attempt>
    /txn/segment-state/aborted/<seg>:<txn>            aborted record: its entries up to a position
    /txn/segment-state/owner/<seg>                    epoch of the segment's owner
    /txn/segment-state/epoch-floor                    the highest epoch that a deleted segment had
    /txn/segment-state/nudge/<seg>                    the collector asks the owner to look again
    /txn/key/<owner>&<key>                            a transaction key (`key_records`)
    /txn/key-floor/<tc>                               epochs that deleted keys had (`key_records`)
    /txn/tc-seq/<tc>                                  first transaction number not reserved
    /txn/tc/leader/<tc>                               who leads a coordinator (ephemeral)
    /txn/tc/parallelism                               number of coordinators

Rules:

- `<seg>` and `<sub>` are URL-encoded as Pulsar does, so a colon only ever separates; numbers are 20
  digits.
- Everything of a transaction lives in the partition `<txn>`: a read of the header after a put of a
  claim is not older than that put (W2), and one range holds all records of a transaction (W10).
  What is of an attempt is its group's: header, partition and range (G9).
- Everything of a segment lives in the partition `<seg>`.
- Decoding verifies: a record that is not whole is `CorruptTransactionRecord`.
"""

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple, cast

from magnetar.protocol.ids import Position
from magnetar.protocol.names import decode_name, encode_name
from magnetar.protocol.txn_id import LAST_ATTEMPT, CoordinatorId, TxnId
from storage.metadata.keys import number
from storage.metadata.store import IndexEntry
from txn.errors import CorruptTransactionRecord
from txn.group import Group
from txn.group_records import decode_group, encode_group
from txn.record_json import decode_members, decode_or_raise, integer, json_bytes, text

HEADERS = "/txn/id/"
OPERATIONS = "/txn/op/"
LEADERS = "/txn/tc/leader"
PARALLELISM = "/txn/tc/parallelism"
CLEANUP_REQUESTS = "/txn/segment-state/nudge"
EPOCH_FLOOR = "/txn/segment-state/epoch-floor"

DEADLINE_INDEX = "idx:txn-by-deadline"
FINAL_STATE_INDEX = "idx:txn-by-final-state"
WRITES_INDEX = "idx:writes-by-segment"
ACKS_INDEX = "idx:acks-by-segment-subscription"
ABORTED_INDEX = "idx:txn-aborted-by-position"

_OWN_HEADER = re.compile(
    rb'\{"state":"(OPEN|COMMITTED|ABORTED)","timeout":(0|[1-9][0-9]{0,17})\.([0-9]{3})000000,'
    rb'"createdAt":(0|[1-9][0-9]{0,17})\.([0-9]{3})000000'
    rb'(?:,"finalizedAt":(0|[1-9][0-9]{0,17})\.([0-9]{3})000000)?\}'
)
"""A header without owner, key and group as `encode_header` writes it: most are so, and are read
without JSON."""


class TxnState(enum.Enum):
    """The state of a transaction in its header."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"

    __hash__ = object.__hash__  # that of Enum is not written in C


class KeyEpoch(NamedTuple):
    """A transaction key of some owner, and one epoch of it."""

    key: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Header:
    """A transaction as its header has it.

    `owner` is the principal that began it, if any; `key_epoch` the key of that owner it was
    begun under, if any (K3); `group` is there if it is one.
    """

    state: TxnState
    timeout_ms: int
    created_ms: int
    finalized_ms: int | None = None
    owner: str | None = None
    key_epoch: KeyEpoch | None = None
    group: Group | None = None

    @property
    def deadline_ms(self) -> int:
        """When it is aborted if it is still open."""
        return self.created_ms + self.timeout_ms


@dataclass(frozen=True, slots=True)
class Claim:
    """One owner's promise about its entries of a transaction: none is at or before `floor`."""

    txn: TxnId
    segment: str
    epoch: int
    floor: Position


@dataclass(frozen=True, slots=True)
class AckedPosition:
    """An entry, or the messages of a batch: `ack_set` words have a set bit for what remains."""

    position: Position
    ack_set: tuple[int, ...] = ()
    batch_size: int = 0


@dataclass(frozen=True, slots=True)
class AckRecord:
    """The acknowledgements of one ACK command, waiting for the end of their transaction."""

    txn: TxnId
    segment: str
    subscription: str
    epoch: int
    number: int
    cumulative: bool
    acks: tuple[AckedPosition, ...]
    consumer: str = ""
    """Identity of the consumer that acknowledged (A9); empty if unknown."""


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """The owner of a segment; the epoch rises with every owner."""

    epoch: int
    broker: str


# Paths


def partition_of(txn: TxnId) -> str:
    """Where the header and all claims and acknowledgement records are (G9)."""
    return str(txn.group)


def header_key(txn: TxnId) -> str:
    """Where the header is; of an attempt, its group's (G1)."""
    return f"{HEADERS}{txn.group}"


def txn_of_header(key: str) -> TxnId:
    """Return the transaction whose header is at `key`.  Raises `CorruptTransactionRecord`."""
    return decode_or_raise(key, lambda: TxnId.parse(key.removeprefix(HEADERS)))


def txn_of_operation(key: str) -> TxnId:
    """Return the transaction of a claim or ack record.  Raises `CorruptTransactionRecord`."""
    return decode_or_raise(key, lambda: _txn_of_operation(key))


def _txn_of_operation(key: str) -> TxnId:
    of, _, name = key.removeprefix(OPERATIONS).partition("/")
    txn, parts = TxnId.parse(of), name.split(":")
    if len(parts) == (3 if parts[0] == "w" else 5):
        return txn
    index = int(parts[-1])
    if txn.attempt_index or not 1 <= index <= LAST_ATTEMPT:
        raise ValueError(f"it is of attempt {index} of {txn}")
    return txn.attempt_of(index)


def operations_range(txn: TxnId) -> tuple[str, str]:
    """Scan bounds of all claims and acknowledgement records of a transaction, or a group (G9)."""
    return f"{OPERATIONS}{txn.group}/", f"{OPERATIONS}{txn.group}//"


def claim_key(txn: TxnId, segment: str, epoch: int) -> str:
    """Where an owner's claim is: the epoch in it makes it that owner's own (W3, W6)."""
    name = f"w:{encode_name(segment)}:{number(epoch)}"
    return f"{OPERATIONS}{txn.group}/{name}{_attempt_part(txn)}"


def ack_key(record: AckRecord) -> str:
    """Where the acknowledgements of one command are (A1)."""
    names = f"{encode_name(record.segment)}:{encode_name(record.subscription)}"
    name = f"a:{names}:{number(record.epoch)}:{number(record.number)}"
    return f"{OPERATIONS}{record.txn.group}/{name}{_attempt_part(record.txn)}"


def _attempt_part(txn: TxnId) -> str:
    """G9: what makes the key one attempt's own among all that its group has."""
    return f":{number(txn.attempt_index)}" if txn.attempt_index else ""


def aborted_key(segment: str, txn: TxnId) -> str:
    """Where an aborted transaction is remembered for a segment."""
    return f"/txn/segment-state/aborted/{encode_name(segment)}:{txn}"


def owner_key(segment: str) -> str:
    """Where the owner's epoch is."""
    return f"/txn/segment-state/owner/{encode_name(segment)}"


def cleanup_request_key(segment: str) -> str:
    """Where a collector asks a segment's owner to clean up; no partition key."""
    return f"{CLEANUP_REQUESTS}/{encode_name(segment)}"


def segment_of_cleanup_request(key: str) -> str:
    """Return the segment that a cleanup request names.  Raises `InvalidTopicName`."""
    return decode_name(key.removeprefix(f"{CLEANUP_REQUESTS}/"))


def sequence_key(coordinator: CoordinatorId) -> str:
    """Where a coordinator's first unreserved number is."""
    return f"/txn/tc-seq/{coordinator}"


def leader_key(coordinator: CoordinatorId) -> str:
    """Where the leader of a coordinator stands."""
    return f"{LEADERS}/{coordinator}"


# Indexes


def header_indexes(header: Header) -> tuple[IndexEntry, ...]:
    """By deadline while open, by state and time of its end afterwards."""
    if header.state is TxnState.OPEN:
        return (IndexEntry(DEADLINE_INDEX, number(header.deadline_ms)),)
    ended = number(header.finalized_ms or 0)
    return (IndexEntry(FINAL_STATE_INDEX, f"{header.state.value}:{ended}"),)


def claim_indexes(segment: str) -> tuple[IndexEntry, ...]:
    """By segment."""
    return (IndexEntry(WRITES_INDEX, encode_name(segment)),)


def ack_indexes(segment: str, subscription: str) -> tuple[IndexEntry, ...]:
    """By segment and subscription."""
    return (IndexEntry(ACKS_INDEX, acks_index_key(segment, subscription)),)


def acks_index_key(segment: str, subscription: str) -> str:
    """The secondary key of all acknowledgement records of one subscription."""
    return f"{encode_name(segment)}:{encode_name(subscription)}"


def aborted_indexes(segment: str, up_to: Position) -> tuple[IndexEntry, ...]:
    """By segment and position: what went with dropped ledgers is found as a range."""
    return (IndexEntry(ABORTED_INDEX, f"{encode_name(segment)}:{_index_position(up_to)}"),)


def _index_position(position: Position) -> str:
    return f"{number(max(position.ledger_id, 0))}:{number(max(position.entry_id, 0))}"


# Values


def encode_header(header: Header) -> bytes:
    """As Pulsar writes it: times are decimal seconds with nine digits, None is left out."""
    members = [
        f'"state":"{header.state.value}"',
        f'"timeout":{_seconds(header.timeout_ms)}',
        f'"createdAt":{_seconds(header.created_ms)}',
    ]
    if header.finalized_ms is not None:
        members.append(f'"finalizedAt":{_seconds(header.finalized_ms)}')
    if header.owner is not None:
        members.append(f'"owner":{json.dumps(header.owner)}')
    if header.key_epoch is not None:
        members.append(f'"transactionKey":{json.dumps(header.key_epoch.key)}')
        members.append(f'"transactionKeyEpoch":{header.key_epoch.epoch}')
    if header.group is not None:
        members.append(f'"group":{json_bytes(encode_group(header.group)).decode()}')
    return ("{" + ",".join(members) + "}").encode()


def decode_header(key: str, value: bytes) -> Header:
    """The header stored at `key`.  Raises `CorruptTransactionRecord`."""
    own = _OWN_HEADER.fullmatch(value)
    if own is not None:
        state, *times = own.groups()
        timeout_ms, created_ms = int(times[0] + times[1]), int(times[2] + times[3])
        finalized_ms = None if times[4] is None else int(times[4] + times[5])
        return Header(TxnState(state.decode()), timeout_ms, created_ms, finalized_ms)

    def decode() -> Header:
        members = decode_members(value)
        finalized = members.get("finalizedAt")
        owner = members.get("owner")
        if owner is not None and not isinstance(owner, str):
            raise ValueError("the owner is no text")
        return Header(
            TxnState(members["state"]),
            _milliseconds(members["timeout"]),
            _milliseconds(members["createdAt"]),
            None if finalized is None else _milliseconds(finalized),
            owner,
            _tied(members),
            decode_group(members["group"]) if "group" in members else None,
        )

    return decode_or_raise(key, decode)


def _tied(members: Mapping[str, object]) -> KeyEpoch | None:
    if "transactionKey" not in members:
        return None
    return KeyEpoch(text(members["transactionKey"]), integer(members["transactionKeyEpoch"]))


def encode_claim(claim: Claim) -> bytes:
    """PIP-473's write record; its position is the floor (W13)."""
    return json_bytes(
        {
            "kind": "WRITE",
            "segment": claim.segment,
            "ledgerId": claim.floor.ledger_id,
            "entryId": claim.floor.entry_id,
            "epoch": claim.epoch,
        }
    )


def encode_ack(record: AckRecord) -> bytes:
    """PIP-473's ack record, with all positions of one command."""
    return json_bytes(
        {
            "kind": "ACK",
            "segment": record.segment,
            "subscription": record.subscription,
            "cumulative": record.cumulative,
            "epoch": record.epoch,
            "number": record.number,
            "consumer": record.consumer,
            "positions": [
                [*ack.position, ack.batch_size, *ack.ack_set] if ack.ack_set else [*ack.position]
                for ack in record.acks
            ],
        }
    )


def decode_operation(key: str, value: bytes) -> Claim | AckRecord:
    """The claim or acknowledgement record stored at `key`.  Raises `CorruptTransactionRecord`."""

    def decode() -> Claim | AckRecord:
        txn = _txn_of_operation(key)
        members = decode_members(value)
        segment, epoch = text(members["segment"]), integer(members["epoch"])
        if members["kind"] == "WRITE":
            floor = Position(integer(members["ledgerId"]), integer(members["entryId"]))
            return Claim(txn, segment, epoch, floor)
        if members["kind"] != "ACK":
            raise ValueError(f"its kind is {members['kind']!r}")
        return AckRecord(
            txn,
            segment,
            text(members["subscription"]),
            epoch,
            integer(members["number"]),
            bool(members["cumulative"]),
            tuple(_acked(item) for item in cast("Sequence[Sequence[int]]", members["positions"])),
            text(members.get("consumer", "")),
        )

    decoded = decode_or_raise(key, decode)
    named = (
        claim_key(decoded.txn, decoded.segment, decoded.epoch)
        if isinstance(decoded, Claim)
        else ack_key(decoded)
    )
    if named != key:
        raise CorruptTransactionRecord(
            f"The record {key} holds what belongs at {named}: restore the metadata store."
        )
    return decoded


def encode_aborted(up_to: Position) -> bytes:
    """The position up to which the aborted entries of a transaction are."""
    return json_bytes({"maxLedgerId": up_to.ledger_id, "maxEntryId": up_to.entry_id})


def decode_aborted(key: str, value: bytes) -> tuple[TxnId, Position]:
    """Decode an aborted record: transaction, last position.  Raises `CorruptTransactionRecord`."""

    def decode() -> tuple[TxnId, Position]:
        members = decode_members(value)
        at = Position(integer(members["maxLedgerId"]), integer(members["maxEntryId"]))
        return TxnId.parse(key.rpartition(":")[2]), at

    return decode_or_raise(key, decode)


def encode_owner(owner: OwnerRecord) -> bytes:
    """The epoch and the broker's id."""
    return json_bytes({"epoch": owner.epoch, "broker": owner.broker})


def decode_owner(key: str, value: bytes) -> OwnerRecord:
    """The owner stored at `key`.  Raises `CorruptTransactionRecord`."""

    def decode() -> OwnerRecord:
        members = decode_members(value)
        return OwnerRecord(integer(members["epoch"]), text(members["broker"]))

    return decode_or_raise(key, decode)


def encode_sequence(first_unreserved: int) -> bytes:
    """A coordinator's sequence."""
    return json_bytes({"next": first_unreserved})


def decode_sequence(key: str, value: bytes) -> int:
    """The first number that nobody reserved.  Raises `CorruptTransactionRecord`."""
    return decode_or_raise(key, lambda: integer(decode_members(value)["next"]))


def _acked(item: Sequence[int]) -> AckedPosition:
    ledger_id, entry_id, *batch = (integer(part) for part in item)
    if not batch:
        return AckedPosition(Position(ledger_id, entry_id))
    return AckedPosition(Position(ledger_id, entry_id), tuple(batch[1:]), batch[0])


def _seconds(milliseconds: int) -> str:
    whole, rest = divmod(milliseconds, 1000)
    return f"{whole}.{rest:03d}000000"


def _milliseconds(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError(f"{value!r} is no time in seconds")
    return int(value * 1000)
