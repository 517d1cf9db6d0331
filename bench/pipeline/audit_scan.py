"""How fast an audit scans, by how many rows there are: the rate should not fall with them.

Rules: rows are published in entries of `ENTRY_ROWS`, in transactions of `TRANSACTION_ENTRIES`, over
`SEGMENTS` segments; each audit must find nothing wrong and all rows.  Sizes are audited from the
smallest on and then in turn, so that what the workers hold at most can be told for each size; those
of more than `ONCE_ROWS` once.  What is measured is a rate and not a start: before it a topic of
next to nothing is audited `WARM_UPS` times, by when workers have imported and connected, and the
JVM has compiled what a job needs.  Beside the rate as it is there is the one without what the scan
of that topic takes then: that is Spark's start of a job.
"""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import magnetar
from bench.pipeline.ground import Ground
from bench.processes import peak_resident_mib
from magnetar.layout import Segment
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import segment_hash
from magnetar.protocol.message import build_batch
from magnetar.spark.admin import AdminRest
from magnetar.spark.audit.job import audit
from magnetar.spark.options import Connection
from tests.support.raw_client import RawClient, RawProducer

ENTRY_ROWS: Final = 1000
TRANSACTION_ENTRIES: Final = 100
SEGMENTS: Final = 2
LEAST_ROWS: Final = SEGMENTS * ENTRY_ROWS
WARM_UPS: Final = 20
ONCE_ROWS: Final = 20_000_000
VALUE: Final = b"0123456789"
WINDOW: Final = 64
TIMEOUT_S: Final = 60.0
TRANSACTION_TIMEOUT_S: Final = 300.0
_WORKER: Final = b"pyspark.daemon"
Figures = dict[int, dict[str, list[float]]]


def measured(ground: Ground, sizes: Sequence[int], runs: int) -> Figures:
    """Of each number of rows: rows a second of the scan, seconds of the audit, peak of a worker."""
    topics = {rows: _filled(ground, rows) for rows in sorted(sizes)}
    least = _filled(ground, LEAST_ROWS)
    _audited(ground, topics[min(sizes)], min(sizes))
    for _ in range(WARM_UPS):
        _audited(ground, least, LEAST_ROWS)
    begins_s = statistics.median(_audited(ground, least, LEAST_ROWS)[0] for _ in range(runs + 1))
    found: Figures = {rows: defaultdict(list) for rows in topics}
    for run in range(runs):
        for rows, topic in topics.items():
            if run and rows > ONCE_ROWS:
                continue
            scan_s, audit_s = _audited(ground, topic, rows)
            found[rows]["rows_per_s"].append(rows / scan_s)
            found[rows]["without_start_rows_per_s"].append(rows / (scan_s - begins_s))
            found[rows]["audit_s"].append(audit_s)
            if run == 0:
                found[rows]["worker_mib"].append(_largest_worker_mib())
    return found


def _audited(ground: Ground, topic: str, rows: int) -> tuple[float, float]:
    """Seconds of the scan, and of the audit."""
    connection = Connection(ground.url)
    report = audit(ground.spark, connection, AdminRest(ground.broker.admin_url), topic)
    assert report.rows == rows, f"the audit saw {report.rows} of {rows} rows"
    assert report.findings.is_clean, report.headline()
    return report.scan_s, report.took_s


def _largest_worker_mib() -> float:
    """Of the workers that are alive, the most that one of them ever held."""
    found = [0.0]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if _WORKER in (process / "cmdline").read_bytes():
                found.append(peak_resident_mib(int(process.name)))
        except (OSError, ValueError):
            continue  # It has ended meanwhile.
    return max(found)


def _filled(ground: Ground, rows: int) -> str:
    topic = ground.new_topic(SEGMENTS)
    asyncio.run(_publish(ground.url, topic, rows))
    return topic


async def _publish(url: str, topic: str, rows: int) -> None:
    host, _, port = url.removeprefix("pulsar://").partition(":")
    entries = rows // ENTRY_ROWS // SEGMENTS
    async with magnetar.connect(url) as client:
        segments = (await client.layout(topic)).active
        raw = await RawClient.open(host, int(port), timeout_s=TIMEOUT_S)
        try:
            async with asyncio.TaskGroup() as tasks:
                for segment in segments:
                    tasks.create_task(_publish_segment(client, raw, segment, entries))
        finally:
            await raw.close()


async def _publish_segment(
    client: magnetar.Client, raw: RawClient, segment: Segment, entries: int
) -> None:
    await raw.lookup(segment.topic)
    producer = await raw.create_producer(segment.topic)
    payload = _payload(segment)
    for first in range(0, entries, TRANSACTION_ENTRIES):
        last = min(first + TRANSACTION_ENTRIES, entries)
        async with client.transaction(timeout_s=TRANSACTION_TIMEOUT_S) as transaction:
            for begin in range(first, last, WINDOW):
                numbers = range(begin, min(begin + WINDOW, last))
                sends = (_send(producer, transaction.id, payload, number) for number in numbers)
                await asyncio.gather(*sends)


async def _send(producer: RawProducer, txn: tuple[int, int], payload: bytes, number: int) -> None:
    first, last = number * ENTRY_ROWS, (number + 1) * ENTRY_ROWS - 1
    most, least = txn
    await producer.send(
        payload,
        sequence_id=first,
        send=pb.CommandSend(
            num_messages=ENTRY_ROWS,
            highest_sequence_id=last,
            txnid_most_bits=most,
            txnid_least_bits=least,
        ),
        metadata=pb.MessageMetadata(
            publish_time=int(time.time() * 1000),
            num_messages_in_batch=ENTRY_ROWS,
            highest_sequence_id=last,
            txnid_most_bits=most,
            txnid_least_bits=least,
        ),
    )


def _payload(segment: Segment) -> bytes:
    """Rows with keys that belong to the segment."""
    keys: list[str] = []
    number = 0
    while len(keys) < ENTRY_ROWS:
        key = f"k{number}"
        number += 1
        if segment.hash_start <= segment_hash(key.encode()) <= segment.hash_end:
            keys.append(key)
    return build_batch(
        (pb.SingleMessageMetadata(partition_key=key, payload_size=len(VALUE)), VALUE)
        for key in keys
    )
