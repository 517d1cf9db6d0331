"""What the tasks of an offload do: write the rows of a range, read a file again, read raw entries.

Runs on executors.  Rules:

- A file has the rows that consumers get of a range, in the order of `order_key`, with all columns
  of the source.  A range without such rows has no file.
- A file that is there, of the same range of the same segment, is whole, and is not written again:
  its footer says what it is.
- Reading again trusts nothing that was told before: neither the writer nor the footer.
"""

import hashlib
import tempfile
from dataclasses import dataclass
from typing import IO, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute

from pipeline.audit.observer import Observer
from pipeline.audit.seen import NO_ROWS, Tally
from pipeline.columns import BASE_SCHEMA, arrow_schema, record_batch
from pipeline.connecting import connected
from pipeline.offload.manifest import TableFile, file_name
from pipeline.offload.place import PART_BYTES, Place
from pipeline.options import Connection
from pipeline.row_hash import hash_sum, row_hash
from pipeline.segment_rows import SegmentRows
from pipeline.tasks import SegmentRange
from pipeline.topic_reading import TopicReading
from protocol.ids import Position

__all__ = ["RawSegment", "SeenRaw", "read_file", "read_raw", "write_file"]

ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
_SOURCE: Final = b"magnetar.source"


@dataclass(frozen=True, slots=True)
class RawSegment:
    """What is to be read raw: a segment, and its ledgers with how many entries each has."""

    segment_id: int
    topic: str
    ledgers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SeenRaw:
    """What was seen of it: the hash of the entries of each ledger, and the rows to be read."""

    segment_id: int
    entries_sha256: dict[int, str]
    readable: Tally


def write_file(
    connection: Connection, place: Place, topic: str, created_at_ms: int, part: SegmentRange
) -> str | None:
    """The name of the file with the rows of a range; None if it has none."""
    name = file_name(topic, part)
    source = f"{part.topic} {created_at_ms} {name}".encode()
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


def read_file(place: Place, name: str) -> TableFile | None:
    """What a file has; None if it is not there, is damaged, or its rows are not in order."""
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
            return _seen(pq.ParquetFile(file), name, size, digest.hexdigest())
        except pa.ArrowException:
            return None


def _seen(file: pq.ParquetFile, name: str, size: int, sha256: str) -> TableFile | None:
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
    """All entries of a segment, one ledger after the other."""
    client = connected(connection)
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
