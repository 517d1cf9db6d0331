"""The tasks of an offload, for executors: write rows of a range, read files and raw entries."""

import hashlib
import tempfile
from dataclasses import dataclass
from typing import IO, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute

from magnetar.protocol.ids import Position
from magnetar.spark.columns import BASE_SCHEMA, arrow_schema, record_batch
from magnetar.spark.connecting import process_client
from magnetar.spark.offload.manifest import TableFile, file_name
from magnetar.spark.offload.place import PART_BYTES, TablePlace
from magnetar.spark.options import Connection
from magnetar.spark.range_facts import NO_ROWS, Tally
from magnetar.spark.range_observer import Observer
from magnetar.spark.row_hash import hash_sum, row_hash
from magnetar.spark.segment_rows import SegmentRows
from magnetar.spark.tasks import SegmentRange
from magnetar.spark.topic_reading import TopicReading

__all__ = ["RawSegment", "SeenRaw", "read_file", "read_raw", "write_file"]

ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
_SOURCE: Final = b"magnetar.source"


@dataclass(frozen=True, slots=True)
class RawSegment:
    """A segment to read raw: its ledgers, each with its number of entries."""

    segment_id: int
    topic: str
    ledgers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SeenRaw:
    """The result of reading it: the hash of each ledger's entries, and a tally of readable rows."""

    segment_id: int
    entries_sha256: dict[int, str]
    readable: Tally


def write_file(
    connection: Connection, place: TablePlace, topic: str, created_at_ms: int, part: SegmentRange
) -> str | None:
    """Write the file with the rows of a range; its name, or None if the range has no rows.

    It has the rows that consumers get, with all columns of the source, in order of `order_key`.
    """
    name = file_name(topic, part)
    source = f"{part.topic} {created_at_ms} {name}".encode()
    # A file of that name is whole; its footer says whether it is of this topic and this range.
    with tempfile.TemporaryFile() as there:
        if place.get(name, there) and _source_of(there) == source:
            return name
    schema = arrow_schema(BASE_SCHEMA)
    with tempfile.TemporaryFile() as file:
        rows = 0
        described = schema.with_metadata({_SOURCE: source})
        with pq.ParquetWriter(file, described, compression="zstd") as writer:
            waiting: list[pa.RecordBatch] = []
            for columns in SegmentRows(TopicReading(connection, topic), part):
                waiting.append(record_batch(columns, part.segment_id, schema))
                rows += len(columns)
                if sum(each.nbytes for each in waiting) >= ROW_GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(waiting))
                    waiting.clear()
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting))
        if not rows:
            return None
        file.seek(0)
        place.put(name, file)
    return name


def _source_of(file: IO[bytes]) -> bytes | None:
    try:
        file.seek(0)
        found = (pq.ParquetFile(file).schema_arrow.metadata or {}).get(_SOURCE)
    except pa.ArrowException:
        return None
    return bytes(found) if found is not None else None


def read_file(place: TablePlace, name: str) -> TableFile | None:
    """Read a file again; None if it is missing or damaged, or its rows are not in order."""
    # All from the rows themselves: neither the writer nor the footer is trusted.
    with tempfile.TemporaryFile() as file:
        if not place.get(name, file):
            return None
        size = file.tell()
        file.seek(0)
        digest = hashlib.sha256()
        while part := file.read(PART_BYTES):
            digest.update(part)
        file.seek(0)
        try:
            return _summary_of(pq.ParquetFile(file), name, size, digest.hexdigest())
        except pa.ArrowException:
            return None


def _summary_of(file: pq.ParquetFile, name: str, size: int, sha256: str) -> TableFile | None:
    total, first, last = NO_ROWS, b"", b""
    times: list[int] = []
    versions: set[bytes] = set()
    wanted = ["key", "value", "order_key", "publish_time", "schema_version"]
    for batch in file.iter_batches(columns=wanted):
        keys, values = batch["key"].to_pylist(), batch["value"].to_pylist()
        hashes = (
            row_hash(None if key is None else key.encode(), value)
            for key, value in zip(keys, values, strict=True)
        )
        total = total.plus(Tally(batch.num_rows, hash_sum(hashes)))
        for key in batch["order_key"].to_pylist():
            if key <= last:
                return None
            first, last = first or key, key
        found = compute.min_max(batch["publish_time"].cast(pa.int64()))
        times += [each for each in (found["min"].as_py(), found["max"].as_py()) if each is not None]
        versions.update(v for v in batch["schema_version"].unique().to_pylist() if v is not None)
    return TableFile(
        name,
        size,
        sha256,
        total.messages,
        total.hash_sum,
        first.hex(),
        last.hex(),
        min(times) // 1000 if times else None,
        max(times) // 1000 if times else None,
        tuple(sorted(each.hex() for each in versions)),
    )


def read_raw(connection: Connection, segment: RawSegment) -> SeenRaw:
    """Read all entries of a segment, one ledger after the other."""
    client = process_client(connection)
    whole = [Position(ledger_id, entries) for ledger_id, entries in segment.ledgers if entries]
    start = Position(whole[0].ledger_id, 0) if whole else Position(0, 0)
    observer = Observer(segment.segment_id, start, whole[-1] if whole else start)
    hashes: dict[int, str] = {}
    for end in whole:
        digest = hashlib.sha256()
        begin = Position(end.ledger_id, 0)
        for entries in client.iterate(
            lambda core, begin=begin, end=end: core.read_range(segment.topic, begin, end, raw=True)  # type: ignore[misc]
        ):
            for entry in entries:
                digest.update(len(entry.data).to_bytes(4, "big"))
                digest.update(entry.entry_id.to_bytes(8, "big"))
                digest.update(entry.data)
            observer.take(entries)
        hashes[end.ledger_id] = digest.hexdigest()
    total = NO_ROWS
    for each in observer.result().transactions.values():
        total = total.plus(each.readable)
    return SeenRaw(segment.segment_id, hashes, total)
