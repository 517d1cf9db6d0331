"""Compaction over REST and by threshold, of topics and of partitioned topics."""

import asyncio
from pathlib import Path
from typing import cast

import pytest
import typer

from broker.cli.compaction import _path
from magnetar.cli.main import build_app
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.commands import run_command
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import TIMEOUT_S
from tests.unit.broker.admin.conftest import Rest, asking

PERSISTENT = "/admin/v2/persistent/public/default"
NAME = "persistent://public/default/c"
NAMESPACE = "/admin/v2/namespaces/public/default"


async def send(rest: Rest, name: str, count: int, size: int = 1) -> None:
    if "-partition-" not in name:
        await rest.call("PUT", f"{PERSISTENT}/{name.rpartition('/')[2]}")
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    producer = await client.create_producer(name)
    for index in range(count):
        metadata = pb.MessageMetadata(partition_key=f"k{index % 2}")
        await producer.send(b"x" * size, metadata=metadata)
    await client.close()


async def ended(rest: Rest, topic: str) -> dict[str, object]:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found = cast("dict[str, object]", await rest.get(f"{PERSISTENT}/{topic}/compaction"))
            if found["status"] not in ("RUNNING", "NOT_RUN"):
                return found
            await asyncio.sleep(0.01)


async def test_a_topic_is_compacted_and_shows_it(rest: Rest) -> None:
    await rest.refused(404, "PUT", f"{PERSISTENT}/c/compaction")
    await send(rest, NAME, 5)
    assert await rest.get(f"{PERSISTENT}/c/compaction") == {"status": "NOT_RUN", "lastError": ""}
    await rest.done("PUT", f"{PERSISTENT}/c/compaction")
    assert await ended(rest, "c") == {"status": "SUCCESS", "lastError": ""}
    stats = cast("dict[str, dict[str, object]]", await rest.get(f"{PERSISTENT}/c/stats"))
    shown = stats["compaction"]
    assert shown["lastCompactionRemovedEventCount"] == 3
    assert cast("int", shown["lastCompactionSucceedTimestamp"]) > 0
    assert shown["lastCompactionFailedTimestamp"] == 0
    assert "__compaction" in stats["subscriptions"]
    ledgers = cast("dict[str, dict[str, int]]", await rest.get(f"{PERSISTENT}/c/internalStats"))
    assert ledgers["compactedLedger"]["entries"] == 2
    assert await rest.get(f"{PERSISTENT}/c/properties") == {}
    _, page = await rest.raw("GET", "/metrics", "", {})
    assert any(
        line.startswith("pulsar_compaction_removed_event_count{") and line.endswith(" 3.0")
        for line in page.splitlines()
    )
    # Deleting the subscription drops the compacted ledger.
    await rest.done("DELETE", f"{PERSISTENT}/c/subscription/__compaction")
    ledgers = cast("dict[str, dict[str, int]]", await rest.get(f"{PERSISTENT}/c/internalStats"))
    assert ledgers["compactedLedger"]["ledgerId"] == -1


async def test_a_topic_that_is_being_compacted_is_not_compacted_again(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()

    async def wait(*_: object) -> None:
        await gate.wait()
        raise OSError("no space")

    monkeypatch.setattr("broker.topics.compactor.compact", wait)
    await send(rest, NAME, 1)
    await rest.done("PUT", f"{PERSISTENT}/c/compaction")
    await rest.refused(409, "PUT", f"{PERSISTENT}/c/compaction")
    assert await rest.get(f"{PERSISTENT}/c/compaction") == {"status": "RUNNING", "lastError": ""}
    gate.set()
    assert await ended(rest, "c") == {"status": "ERROR", "lastError": "no space"}


async def test_each_partition_is_compacted(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/c/partitions", 2)
    for index in range(2):
        await send(rest, f"{NAME}-partition-{index}", 5)
    await rest.done("PUT", f"{PERSISTENT}/c/compaction")
    assert (await ended(rest, "c"))["status"] == "SUCCESS"
    for index in range(2):
        found = await rest.get(f"{PERSISTENT}/c-partition-{index}/stats")
        shown = cast("dict[str, dict[str, object]]", found)["compaction"]
        assert shown["lastCompactionRemovedEventCount"] == 3
    # New partitions do not get the subscription of compaction.
    await rest.done("POST", f"{PERSISTENT}/c/partitions", 3)
    assert await rest.get(f"{PERSISTENT}/c-partition-2/subscriptions") == []


async def test_a_namespace_has_topics_compacted_above_its_threshold(tmp_path: Path) -> None:
    async with asking(tmp_path, broker_service_compaction_monitor_interval_s=1) as rest:
        threshold = f"{NAMESPACE}/compactionThreshold"
        assert (await rest.call("GET", threshold))[0] == 204
        await rest.refused(412, "PUT", threshold, -1)
        await rest.done("PUT", threshold, 1000)
        assert await rest.get(threshold) == 1000
        await send(rest, NAME, 2, size=100)
        await send(rest, f"{NAME}-large", 5, size=500)
        assert (await ended(rest, "c-large"))["status"] == "SUCCESS"
        found = cast("dict[str, object]", await rest.get(f"{PERSISTENT}/c/compaction"))
        assert found["status"] == "NOT_RUN"
        # Less than that has come since.
        await asyncio.sleep(1.1)
        stats = cast("dict[str, dict[str, int]]", await rest.get(f"{PERSISTENT}/c-large/stats"))
        assert stats["compaction"]["lastCompactionRemovedEventCount"] == 3
        await rest.done("DELETE", threshold)
        # A topic's own comes before.
        await rest.done("POST", f"{PERSISTENT}/c/compactionThreshold", 10)
        assert (await ended(rest, "c"))["status"] == "SUCCESS"


async def test_its_subscription_is_not_used_and_prevents_a_migration(rest: Rest) -> None:
    await send(rest, NAME, 3)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    with pytest.raises(BrokerError, match="belongs to compaction") as refused:
        await client.subscribe(NAME, "__compaction")
    assert refused.value.code == pb.NotAllowedError
    await client.close()
    await rest.done("PUT", f"{PERSISTENT}/c/compaction")
    await ended(rest, "c")
    skip = f"{PERSISTENT}/c/subscription/__compaction/skip_all"
    status, body = await rest.call("POST", skip)
    assert status == 405, body
    assert "belongs to compaction" in str(body)
    # Nor do its messages expire.
    await send(rest, NAME, 2)
    expire = "expireMessages/0"
    status, body = await rest.call("POST", f"{PERSISTENT}/c/subscription/__compaction/{expire}")
    assert status == 405, body
    await rest.done("POST", f"{PERSISTENT}/c/all_subscription/{expire}")
    stats = cast("dict[str, dict[str, dict[str, int]]]", await rest.get(f"{PERSISTENT}/c/stats"))
    assert stats["subscriptions"]["__compaction"]["msgBacklog"] == 2
    status, body = await rest.call("POST", "/admin/v2/scalable/public/default/c/migrate")
    assert status == 412
    assert "compacted" in str(body)
    await rest.done("DELETE", f"{PERSISTENT}/c/subscription/__compaction")
    await rest.done("POST", "/admin/v2/scalable/public/default/c/migrate")
    status, body = await rest.call("PUT", f"{PERSISTENT}/c/compaction")
    assert status == 405, body
    assert "scalable topics are not" in str(body)
    await rest.refused(412, "POST", f"{PERSISTENT}/c/compactionThreshold", 10)


async def test_the_command_line_compacts_a_topic(rest: Rest) -> None:
    await send(rest, NAME, 5)

    async def run(*words: str) -> str:
        given = [*words, "--admin-url", rest.base]
        done = await run_command(build_app("topics"), ["topics", *given])
        assert done.exit_code == 0, done.output
        return done.output

    assert "SUCCESS" in await run("compact", NAME, "--wait")
    assert "SUCCESS" in await run("compaction-status", "c")


@pytest.mark.parametrize("topic", ["topic://a/b/c", "segment://a/b/c/d", "a/b", "a//b"])
def test_the_command_line_refuses_other_topics(topic: str) -> None:
    with pytest.raises(typer.BadParameter, match="for those alone"):
        _path(topic)
