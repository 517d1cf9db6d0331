"""What is told of the stores: writes and their time, and the BookKeeper client if there is one."""

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from broker.metrics.exposition import BrokerCollector
from broker.metrics.stores import bookkeeper_metrics, metadata_metrics
from storage.clock import SystemClock
from storage.ledger.bookkeeper.bookie_client import BookieCounters, ReplyCode
from storage.ledger.bookkeeper.ledger_services import LedgerCounters
from storage.metadata.counted_metadata import CountedMetadata, WriteCounters
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    MetadataStore,
    Version,
    VersionConflict,
)
from tests.support.embedded_broker import running


def values(metrics: Sequence[Metric]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and the values of their labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in metrics
        for sample in family.samples
    }


def ended(counters: WriteCounters) -> tuple[int, int, int]:
    """How many were asked, succeeded and failed."""
    return counters.asked, sum(counters.succeeded.counts), sum(counters.failed.counts)


class Ticks:
    """A clock that goes on by `step_s` whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self.step_s
        return self._now_s


async def test_writes_are_counted_and_timed_by_kind_and_outcome() -> None:
    store = CountedMetadata(MemoryMetadataStore(SystemClock()), Ticks(0.004))
    made = await store.put("/a", b"1", expect=ABSENT)
    with pytest.raises(VersionConflict):
        await store.put("/a", b"2", expect=ABSENT)
    with pytest.raises(VersionConflict):
        await store.delete("/a", expect=Version(made.version + 1))
    assert await store.delete("/a") is True
    assert await store.delete("/a") is False
    assert ended(store.puts) == (2, 1, 1)
    assert ended(store.deletes) == (3, 2, 1)
    told = values(list(metadata_metrics(store, "c")))
    assert told["magnetar_metadata_writes_total", ("c", "put")] == 2
    assert told["magnetar_metadata_writes_total", ("c", "delete")] == 3
    latency, of = "pulsar_metadata_store_ops_latency_ms", ("c", "metadata-store")
    assert told[f"{latency}_count", (*of, "del", "success")] == 2
    assert told[f"{latency}_bucket", (*of, "del", "success", "3.0")] == 0
    assert told[f"{latency}_bucket", (*of, "del", "success", "5.0")] == 2
    assert told[f"{latency}_sum", (*of, "put", "fail")] == pytest.approx(4)
    await store.close()


async def test_a_write_that_is_given_up_counts_and_has_no_time() -> None:
    store = CountedMetadata(MemoryMetadataStore(SystemClock()), Ticks(1))
    task = asyncio.create_task(store.put("/a", b"1"))
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended(store.puts) == (1, 0, 0)
    await store.close()


async def test_reads_are_counted_by_key_by_scan_and_by_event() -> None:
    store = CountedMetadata(MemoryMetadataStore(SystemClock()), Ticks(1))
    watch = store.watch_children("/d")
    await store.put("/d/k", b"1", indexes=[IndexEntry("i", "x")])
    await store.get("/d/k")
    await store.get_many(["/d/k", "/d/no"])
    await store.children("/d")
    await store.scan("/d/", "/d//")
    await store.scan_index("i", "a", "z")
    await anext(aiter(watch))
    watch.close()
    told = values(list(metadata_metrics(store, "c")))
    counts = {
        labels[1]: value
        for (name, labels), value in told.items()
        if name == "magnetar_metadata_reads_total"
    }
    assert counts == {"get": 3, "scan": 3, "event": 1}
    await store.close()


async def test_everything_else_passes_through() -> None:
    inner = MemoryMetadataStore(SystemClock())
    store: MetadataStore = CountedMetadata(inner, Ticks(1))
    session = await store.open_session(timeout_ms=10_000, identity="me")
    watch = store.watch_children("/d")
    await asyncio.gather(
        store.put("/d/k", b"1"),
        store.put("/d/k", b"2", session=session),
        store.put("/s/", b"", partition="p", sequence=True),
    )
    (record,) = await store.scan("/d/", "/d//")
    assert (record.value, record.ephemeral) == (b"2", True)
    assert await store.get_many(["/d/k", "/d/no"]) == [record, None]
    assert await store.children("/d") == ["k"]
    assert (await anext(aiter(watch))).key == "/d/k"
    watch.close()
    with pytest.raises(InvalidMetadataRequest):
        await store.get("no path")
    await store.close()
    assert session.lost


def test_every_counter_of_the_bookkeeper_client_is_exported() -> None:
    ledgers, bookies = LedgerCounters(), BookieCounters()
    plain = [
        *((ledgers, each.name) for each in fields(LedgerCounters)),
        *((bookies, each.name) for each in fields(BookieCounters) if each.name != "refusals"),
    ]
    for number, (counters, name) in enumerate(plain, start=1):
        setattr(counters, name, number)
    bookies.refusals[ReplyCode.FENCED] = 7
    told = values(list(bookkeeper_metrics(ledgers, bookies, "c", ensemble_size=3)))
    assert told.pop(("magnetar_bookkeeper_ensemble_size", ("c",))) == 3
    codes = {f: value for f, value in told.items() if f[0] == "magnetar_bookkeeper_refusals_total"}
    assert len(codes) == len(set(ReplyCode) - {ReplyCode.OK})
    assert codes["magnetar_bookkeeper_refusals_total", ("c", "fenced")] == 7
    others = [value for key, value in told.items() if key not in codes]
    assert sorted(others) == list(range(1, len(plain) + 1))


async def test_a_broker_counts_its_writes_and_has_no_bookkeeper_client(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as broker:
        told = values(list(BrokerCollector(broker).collect()))
        puts = told["magnetar_metadata_writes_total", (broker.settings.cluster_name, "put")]
        assert puts == broker.metadata.puts.asked > 0
        assert not any("bookkeeper" in name for name, _ in told)
