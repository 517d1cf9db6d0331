"""What a broker knows of others stays true when what follows them breaks."""

import asyncio
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from broker.placement.members import member_key
from broker.placement.placement import PlacementNotReady
from magnetar.protocol.names import NamespaceName, TopicName, parse_topic_name
from storage.managed_ledger.records import ledger_key
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.placement.test_coordinators import shared_by

TOPIC = parse_topic_name("persistent://public/default/watched")
SCALABLE = parse_topic_name("topic://public/default/s")
NAMESPACE = NamespaceName("public", "default")
DEFECT = RuntimeError("a defect")
BROKEN = (DEFECT, StopAsyncIteration())
broken = pytest.mark.parametrize("error", BROKEN, ids=["fails", "ends"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks are not drawn for a terminal, which takes long."""
    with capture_logs():
        yield


@broken
async def test_brokers_that_come_and_go_are_still_known(cluster: Cluster, error: Exception) -> None:
    first, second = await cluster.add(), await cluster.add()
    first.view.spoil_watches(error)
    third = await cluster.add()
    assert third.id in first.placement.brokers
    await third.kill()
    await cluster.all_know(first, second)


@broken
async def test_owners_are_still_known(cluster: Cluster, error: Exception) -> None:
    first, second = await cluster.add(), await cluster.add()
    first.view.spoil_watches(error)
    await second.placement.acquire(TOPIC)
    await until(lambda: first.placement.known_owner(TOPIC) == second.placement.me)
    await second.placement.release(TOPIC)
    await until(lambda: first.placement.known_owner(TOPIC) is None)


@broken
async def test_a_leader_that_goes_is_still_followed_by_another(
    cluster: Cluster, error: Exception
) -> None:
    first, second = await cluster.add(), await cluster.add()
    await until(lambda: first.placement.is_leader)
    second.view.spoil_watches(error)
    await first.kill()
    await until(lambda: second.placement.is_leader)


@broken
async def test_coordinators_are_still_taken_over(cluster: Cluster, error: Exception) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    second.view.spoil_watches(error)
    await first.kill()
    await shared_by(second)


@broken
async def test_policies_are_still_followed(cluster: Cluster, error: Exception) -> None:
    first, second = await cluster.add(), await cluster.add()
    await first.broker.namespaces.require(NAMESPACE)
    first.view.spoil_watches(error)

    async def switched(on: bool) -> None:
        await second.broker.namespaces.change(
            NAMESPACE, lambda policies: policies.update(deduplicationEnabled=on)
        )
        await until(
            lambda: first.broker.namespaces.known(NAMESPACE).raw.get("deduplicationEnabled") is on
        )

    await switched(True)
    await switched(False)


async def test_each_failure_is_logged_once_with_its_traceback(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    first.view.spoil_watches(DEFECT)
    with capture_logs() as logs:
        await second.placement.acquire(TOPIC)
        await until(lambda: first.placement.known_owner(TOPIC) is not None)
    told = [entry for entry in logs if entry.get("task") == "owners"]
    assert [(entry["event"], entry["exc_info"]) for entry in told] == [("task_failed", DEFECT)]


async def test_after_a_restart_of_the_watch_a_later_process_of_ones_id_is_seen(
    cluster: Cluster,
) -> None:
    first = await cluster.add()
    first.view.spoil_watches(DEFECT)
    record = await cluster.metadata.get(member_key(first.id))
    assert record is not None
    later = record.value.replace(first.placement._incarnation.encode(), b"later")
    await cluster.metadata.put(member_key(first.id), later)
    await until(lambda: first.placement.draining)


async def test_a_session_is_opened_again_though_that_failed_in_an_unforeseen_way(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await cluster.add()
    opened = first.view.open_session
    failures = 1

    async def fails_once(*, timeout_ms: int, identity: str) -> object:
        nonlocal failures
        if failures:
            failures -= 1
            raise DEFECT
        return await opened(timeout_ms=timeout_ms, identity=identity)

    monkeypatch.setattr(first.view, "open_session", fails_once)
    before = first.placement.session
    await first.view.expire()
    async with asyncio.timeout(TIMEOUT_S):
        assert await first.placement.live_session() is not before
    assert not failures
    await cluster.all_know(first)


async def test_superseded_broker_has_no_session_and_refuses_requests(cluster: Cluster) -> None:
    first = await cluster.add()
    record = await cluster.metadata.get(member_key(first.id))
    assert record is not None
    later = record.value.replace(first.placement._incarnation.encode(), b"later")
    await first.view.expire()
    await cluster.metadata.put(member_key(first.id), later)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(PlacementNotReady, match="another process has its id"):
            await _session_never_again(first)
    with pytest.raises(PlacementNotReady, match="another process has its id"):
        _ = first.placement.session


async def _session_never_again(node: Node) -> None:
    while True:
        await node.placement.live_session()
        await asyncio.sleep(0)  # it does not wait while the session lives


async def test_superseded_broker_still_stops(cluster: Cluster) -> None:
    first = await cluster.add()
    record = await cluster.metadata.get(member_key(first.id))
    assert record is not None
    later = record.value.replace(first.placement._incarnation.encode(), b"later")
    await cluster.metadata.put(member_key(first.id), later)
    await until(lambda: first.placement.draining)
    waiting = asyncio.ensure_future(first.placement.live_session())
    async with asyncio.timeout(TIMEOUT_S):
        await first.broker.drain()
        await first.stop()
        with pytest.raises(PlacementNotReady, match="another process has its id"):
            await waiting


# Other tasks that live as long as the broker


class FailsOnce:
    """A method that has a defect, which shows at its first call."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls = 0
        self._method = getattr(owner, name)
        patch.setattr(owner, name, self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls == 1:
            raise DEFECT
        return self._method(*args, **kwargs)


async def test_rounds_that_break_off_are_followed_by_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHEDDING_ROUND_S", "LOAD_REPORT_S"):
        for module in ("shedding", "several"):
            monkeypatch.setattr(f"broker.placement.{module}.{name}", 0.01, raising=False)
    node = await cluster.add(
        sealed_segment_prune_interval_s=1, transaction_gc_interval_s=1, idle_topic_unload_s=1
    )
    broker = node.broker
    rounds = [
        FailsOnce(monkeypatch, node.placement.shedding, "round"),
        FailsOnce(monkeypatch, node.placement, "_totals"),
        FailsOnce(monkeypatch, broker.scalable._housekeeping, "prune_all"),
        FailsOnce(monkeypatch, broker.transactions.collector, "collect"),
        FailsOnce(monkeypatch, broker.idle_topics, "unload_idle"),
    ]
    await until(lambda: all(each.calls > 1 for each in rounds))


@broken
async def test_records_of_scalable_topics_are_still_followed(
    cluster: Cluster, error: Exception
) -> None:
    first, second = await cluster.add(), await cluster.add()
    await second.broker.scalable.create(SCALABLE, segments=1, properties={})
    live = await first.broker.scalable._topics.get(SCALABLE)
    first.view.spoil_watches(error)
    await second.broker.scalable.split(SCALABLE, 0)
    await until(lambda: len(live.layout.active) == 2)
    await second.broker.scalable.split(SCALABLE, 1)
    await until(lambda: len(live.layout.active) == 3)


@broken
async def test_names_of_topics_are_still_followed(cluster: Cluster, error: Exception) -> None:
    first, second = await cluster.add(), await cluster.add()
    heard: list[TopicName] = []

    def fails(name: TopicName, exists: bool) -> None:
        raise DEFECT

    forget = [
        await first.broker.topics.follow(NAMESPACE, listener)
        for listener in (fails, lambda name, exists: heard.append(name))
    ]
    first.view.spoil_watches(error)
    await (await second.client()).create_producer(str(TOPIC))
    await until(lambda: TOPIC in heard)
    await cluster.metadata.put(ledger_key("public/default/persistent/%zz"), b"")
    await (await second.client()).create_producer(f"{TOPIC}2")
    await until(lambda: len(heard) == 2)
    for each in forget:
        each()
