"""Pure: the metadata records of transactions: paths, JSON and indexes.

They follow PIP-473, except for claims and epochs, which it does not have.

    /txn/id/<txn>                                     header: state, deadline, owner
    /txn/op/<txn>/w:<seg>:<epoch>                     claim: one writer's entries on one segment
    /txn/op/<txn>/a:<seg>:<sub>:<epoch>:<number>      acknowledgements of one ACK command
    /txn/op/<group>/w:<seg>:<epoch>:<attempt>         the same of an attempt, by its index
    /txn/op/<group>/a:<seg>:<sub>:<epoch>:<number>:<attempt>
    /txn/segment-state/aborted/<seg>:<txn>            aborted record: its entries up to a position
    /txn/segment-state/owner/<seg>                    epoch of the segment's owner
    /txn/segment-state/epoch-floor                    the highest epoch that a deleted segment had
    /txn/segment-state/nudge/<seg>                    the collector asks the owner to clean up
    /txn/key/<owner>&<key>                            a transaction key (`key_records`)
    /txn/key-floor/<tc>                               epochs that deleted keys had (`key_records`)
    /txn/tc-seq/<tc>                                  first transaction number not reserved
    /txn/tc/leader/<tc>                               leader of a coordinator (ephemeral)
    /txn/tc/parallelism                               number of coordinators

`<seg>` and `<sub>` are URL-encoded as in Pulsar, so a colon always separates; numbers have 20
digits.  The records of a segment are in the partition `<seg>`.

Rules (W, G: `docs/transactions.md`):

- W2: header and records of a transaction are in the partition `<txn>`, so a read of the header
  after the put of a claim is not older than that put.
- W3: the key of a claim has the epoch of its owner.
- W10: one range has all claims and acknowledgement records of a transaction.
- G9: header, partition and range of an attempt are those of its group.
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
"""A header without owner, key and group, as `encode_header` writes it.

Most headers are such, and are decoded without a JSON parser.
"""


class TxnState(enum.Enum):
    """The state of a transaction in its header."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"

    __hash__ = object.__hash__  # that of Enum is not written in C


class KeyEpoch(NamedTuple):
    """A transaction key and one of its epochs."""

    key: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a transaction.

    `owner` is the principal that began it, if any; `key_epoch` the key of that owner under which it
    was begun, if any (K3); `group` is set if it is a group.
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
        """The wall-clock time at which the transaction is aborted if it is still open."""
        return self.created_ms + self.timeout_ms


@dataclass(frozen=True, slots=True)
class Claim:
    """One owner's claim: its entries of a transaction are all after `floor`."""

    txn: TxnId
    segment: str
    epoch: int
    floor: Position


@dataclass(frozen=True, slots=True)
class AckedPosition:
    """An entry, or messages of a batch; `ack_set` has a bit for each message that remains."""

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
    """The owner of a segment: its epoch, which rises with every owner, and its broker's id."""

    epoch: int
    broker: str


# Paths


def partition_of(txn: TxnId) -> str:
    """The partition of a transaction's header and of all its records (W2, G9)."""
    # W2: header and claims in one.  G9: of an attempt, its group's.
    return str(txn.group)


def header_key(txn: TxnId) -> str:
    """The key of a header; of an attempt, its group's (G1)."""
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
    # W10: no record of the transaction is outside of this range.
    return f"{OPERATIONS}{txn.group}/", f"{OPERATIONS}{txn.group}//"


def claim_key(txn: TxnId, segment: str, epoch: int) -> str:
    """The key of an owner's claim (W3, W6, G9)."""
    # W3, W6: the epoch makes the key that owner's own.
    name = f"w:{encode_name(segment)}:{number(epoch)}"
    return f"{OPERATIONS}{txn.group}/{name}{_attempt_part(txn)}"


def ack_key(record: AckRecord) -> str:
    """The key of the acknowledgement record of one command (A1, G9)."""
    names = f"{encode_name(record.segment)}:{encode_name(record.subscription)}"
    name = f"a:{names}:{number(record.epoch)}:{number(record.number)}"
    return f"{OPERATIONS}{record.txn.group}/{name}{_attempt_part(record.txn)}"


def _attempt_part(txn: TxnId) -> str:
    """The suffix that distinguishes the records of one attempt from those of its group (G9)."""
    # G9: the rest of the key, and so the range, is the group's.
    return f":{number(txn.attempt_index)}" if txn.attempt_index else ""


def aborted_key(segment: str, txn: TxnId) -> str:
    """The key of a transaction's aborted record for a segment."""
    return f"/txn/segment-state/aborted/{encode_name(segment)}:{txn}"


def owner_key(segment: str) -> str:
    """The key of a segment's owner record."""
    return f"/txn/segment-state/owner/{encode_name(segment)}"


def cleanup_request_key(segment: str) -> str:
    """The key of a collector's request to clean up a segment; it has no partition key."""
    return f"{CLEANUP_REQUESTS}/{encode_name(segment)}"


def segment_of_cleanup_request(key: str) -> str:
    """Return the segment that a cleanup request names.  Raises `InvalidTopicName`."""
    return decode_name(key.removeprefix(f"{CLEANUP_REQUESTS}/"))


def sequence_key(coordinator: CoordinatorId) -> str:
    """The key of a coordinator's first unreserved number."""
    return f"/txn/tc-seq/{coordinator}"


def leader_key(coordinator: CoordinatorId) -> str:
    """The key of the record of a coordinator's leader."""
    return f"{LEADERS}/{coordinator}"


# Indexes


def header_indexes(header: Header) -> tuple[IndexEntry, ...]:
    """Index an open header by its deadline, an ended one by its state and the time of its end."""
    if header.state is TxnState.OPEN:
        return (IndexEntry(DEADLINE_INDEX, number(header.deadline_ms)),)
    ended = number(header.finalized_ms or 0)
    return (IndexEntry(FINAL_STATE_INDEX, f"{header.state.value}:{ended}"),)


def claim_indexes(segment: str) -> tuple[IndexEntry, ...]:
    """Index a claim by segment."""
    return (IndexEntry(WRITES_INDEX, encode_name(segment)),)


def ack_indexes(segment: str, subscription: str) -> tuple[IndexEntry, ...]:
    """Index an acknowledgement record by segment and subscription."""
    return (IndexEntry(ACKS_INDEX, acks_index_key(segment, subscription)),)


def acks_index_key(segment: str, subscription: str) -> str:
    """The secondary key of all acknowledgement records of one subscription."""
    return f"{encode_name(segment)}:{encode_name(subscription)}"


def aborted_indexes(segment: str, up_to: Position) -> tuple[IndexEntry, ...]:
    """Index an aborted record by segment and position."""
    return (IndexEntry(ABORTED_INDEX, f"{encode_name(segment)}:{_index_position(up_to)}"),)


def _index_position(position: Position) -> str:
    return f"{number(max(position.ledger_id, 0))}:{number(max(position.entry_id, 0))}"


# Values


def encode_header(header: Header) -> bytes:
    """Encode a header as Pulsar does: times are decimal seconds with nine digits."""
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
    """Decode the header stored at `key`.  Raises `CorruptTransactionRecord`."""
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
            _key_epoch(members),
            decode_group(members["group"]) if "group" in members else None,
        )

    return decode_or_raise(key, decode)


def _key_epoch(members: Mapping[str, object]) -> KeyEpoch | None:
    if "transactionKey" not in members:
        return None
    return KeyEpoch(text(members["transactionKey"]), integer(members["transactionKeyEpoch"]))


def encode_claim(claim: Claim) -> bytes:
    """Encode a claim as PIP-473's write record; its position is the floor (W13)."""
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
    """Encode PIP-473's ack record, with all positions of one command."""
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
    """Decode the claim or acknowledgement record at `key`.  Raises `CorruptTransactionRecord`."""

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
    """Encode an aborted record: the position up to which entries of the transaction may be."""
    return json_bytes({"maxLedgerId": up_to.ledger_id, "maxEntryId": up_to.entry_id})


def decode_aborted(key: str, value: bytes) -> tuple[TxnId, Position]:
    """Decode an aborted record: transaction, last position.  Raises `CorruptTransactionRecord`."""

    def decode() -> tuple[TxnId, Position]:
        members = decode_members(value)
        at = Position(integer(members["maxLedgerId"]), integer(members["maxEntryId"]))
        return TxnId.parse(key.rpartition(":")[2]), at

    return decode_or_raise(key, decode)


def encode_owner(owner: OwnerRecord) -> bytes:
    """Encode an owner record."""
    return json_bytes({"epoch": owner.epoch, "broker": owner.broker})


def decode_owner(key: str, value: bytes) -> OwnerRecord:
    """Decode the owner record stored at `key`.  Raises `CorruptTransactionRecord`."""

    def decode() -> OwnerRecord:
        members = decode_members(value)
        return OwnerRecord(integer(members["epoch"]), text(members["broker"]))

    return decode_or_raise(key, decode)


def encode_sequence(first_unreserved: int) -> bytes:
    """Encode the first number of a coordinator that is not reserved."""
    return json_bytes({"next": first_unreserved})


def decode_sequence(key: str, value: bytes) -> int:
    """Decode the first number that is not reserved.  Raises `CorruptTransactionRecord`."""
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
