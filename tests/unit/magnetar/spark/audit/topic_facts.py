"""A topic of two segments, the first split in two, with what a scan and the records tell of it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_batch, build_entry, parse_metadata
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.reads import StoredEntry, Visibility
from magnetar.spark.audit.snapshot import (
    Commit,
    KeyState,
    SegmentState,
    Snapshot,
    State,
    TransactionState,
)
from magnetar.spark.range_facts import SeenRange, Tally
from magnetar.spark.range_observer import Observer
from magnetar.spark.row_hash import hash_sum, row_hash

T0_MS = 1_700_000_000_000
TOPIC = "topic://public/default/t"


def entry(
    at: tuple[int, int],
    rows: Iterable[tuple[str, bytes]],
    *,
    first: int = 0,
    sent_ms: int = T0_MS,
    producer: str = "p",
    txn: str | None = None,
    visibility: Visibility = Visibility.READABLE,
) -> StoredEntry:
    """An entry that holds a batch of (key, value)."""
    singles = [
        (SingleMessageMetadata(payload_size=0, partition_key=key, sequence_id=first + i), value)
        for i, (key, value) in enumerate(rows)
    ]
    about = MessageMetadata(
        producer_name=producer,
        sequence_id=first,
        publish_time=sent_ms,
        num_messages_in_batch=len(singles),
    )
    if txn is not None:
        most, _, least = txn.partition("_")
        about.txnid_most_bits, about.txnid_least_bits = int(most), int(least)
    return StoredEntry(*at, build_entry(about, build_batch(singles)), visibility)


def encrypted(plain: StoredEntry) -> StoredEntry:
    """As if its producer had encrypted it: its metadata is to be read, its rows are not."""
    about = parse_metadata(plain.data)
    about.encryption_keys.add(key="k", value=b"secret")
    return plain._replace(data=build_entry(about, b"nobody knows"))


def tally(rows: Iterable[tuple[str, bytes]]) -> Tally:
    """What a writer counts of these rows."""
    hashes = [row_hash(key.encode(), value) for key, value in rows]
    return Tally(len(hashes), hash_sum(hashes))


def seen(segment_id: int, entries: Iterable[StoredEntry]) -> SeenRange:
    """What a scan sees of these."""
    taken = list(entries)
    first, last = taken[0].position, taken[-1].next_position
    observer = Observer(segment_id, first, last)
    observer.take(taken)
    return observer.result()


def segment(segment_id: int, **changes: object) -> SegmentState:
    """One of three: 0 was split into 1 and 2."""
    halves = {0: (0, 0xFFFF), 1: (0, 0x7FFF), 2: (0x8000, 0xFFFF)}
    made = SegmentState(
        segment_id,
        f"segment://public/default/t/{segment_id}",
        () if segment_id == 0 else (0,),
        (1, 2) if segment_id == 0 else (),
        *halves[segment_id],
        sealed=segment_id == 0,
        earliest=Position(10 + segment_id, 0),
        horizon=Position(10 + segment_id, 100),
        raw_end=Position(10 + segment_id, 100),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def header(number: int, state: State, **more: object) -> TransactionState:
    """Of the transaction 1_<number>."""
    return TransactionState(f"1_{number}", state, T0_MS + number, **more)  # type: ignore[arg-type]


def group(
    number: int,
    batch: int,
    winners: Mapping[int, Mapping[str, tuple[int, int]]],
    *,
    epoch: int = 3,
    positions: str | None = None,
) -> TransactionState:
    """A group that committed that batch of query q under key k."""
    return header(
        number,
        State.COMMITTED,
        key="k",
        epoch=epoch,
        is_group=True,
        commit=Commit("q", batch, positions, winners),
        kept_until_ms=T0_MS + 900_000,
    )


def snapshot(
    *headers: TransactionState,
    segments: Iterable[SegmentState] = (),
    keys: tuple[KeyState, ...] = (),
    over: Iterable[str] | None = None,
) -> Snapshot:
    """The records; all headers that are not open had ended before the cut unless told."""
    known = {each.segment_id: each for each in (segment(0), segment(1), segment(2), *segments)}
    ended = {each.txn for each in headers if each.state is not State.OPEN}
    return Snapshot(
        TOPIC,
        T0_MS,
        known,
        frozenset(ended if over is None else over),
        {each.txn: each for each in headers},
        keys,
    )
