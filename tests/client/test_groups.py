"""Attempts of groups, by the client on a broker: what counts, who decides, who is shut out."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator

import aiohttp
import pytest

import magnetar
import magnetar.sync
from magnetar import Attempt, CommittedGroup, GroupRecord, SegmentCount, TransactionKey, Winner
from magnetar.errors import (
    InvalidTransactionStatus,
    NotAllowed,
    TransactionKeyFenced,
)
from tests.client.conftest import MakeTopic, Service

groups_only = pytest.mark.magnetar_only("Apache Pulsar has no groups of transactions")
EARLIEST = magnetar.InitialPosition.EARLIEST
NOTHING_S = 0.5


@pytest.fixture
async def key(client: magnetar.Client) -> AsyncIterator[TransactionKey]:
    async with client.transaction_key(f"job-{uuid.uuid4().hex}") as key:
        yield key


async def begun(key: TransactionKey, nonce: str = "n", timeout_s: float = 60.0) -> Attempt:
    attempt = await key.begin_attempt(nonce, timeout_s=timeout_s)
    assert attempt is not None
    return attempt


async def write(client: magnetar.Client, name: str, attempt: Attempt, *values: str) -> None:
    async with client.producer(name, schema=str) as producer:
        for value in values:
            producer.send_nowait(value, key=value, transaction=attempt)
        await attempt.settled()


async def visible(client: magnetar.Client, name: str) -> list[str]:
    """What is delivered before what is sent now, to each segment."""
    layout = await client.layout(name)
    keys = {layout.of_key(b"%d" % n).segment_id: str(n) for n in range(1000)}
    assert len(keys) == len(layout.active)
    ends = {f"end-{uuid.uuid4().hex}": key for key in keys.values()}
    async with client.producer(name, schema=str) as producer:
        for end, key in ends.items():
            await producer.send(end, key=key)
    values: list[str] = []
    async with client.checkpoint_consumer(name, schema=str) as consumer:
        while not ends.keys() <= set(values):
            values.append((await consumer.receive(timeout_s=20)).value)
    return sorted(each for each in values if not each.startswith("end-"))


@groups_only
async def test_of_a_group_its_winners_count(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey
) -> None:
    name = str(await topic())
    winner, loser, other = [await begun(key) for _ in range(3)]
    assert winner.group == loser.group == other.group
    assert len({winner.id, loser.id, other.id}) == 3
    await write(client, name, winner, "a", "b")
    await write(client, name, loser, "x")
    await write(client, name, other, "c")
    winners = [
        Winner(winner.id, {name: SegmentCount(2, -1)}),
        Winner(other.id, {name: SegmentCount(1, 5)}),
    ]
    done = await key.commit_group(
        "n", winner.group, winners, query="q", batch=3, positions='{"p": 1}'
    )
    assert done == CommittedGroup(False, winner.group)
    again = await key.commit_group(
        "n", winner.group, winners, query="q", batch=3, positions='{"p": 1}'
    )
    assert again == done
    assert await visible(client, name) == ["a", "b", "c"]
    with pytest.raises(InvalidTransactionStatus):
        await key.begin_attempt("n")
    async with client.transaction_key(key.name) as next_key:
        assert next_key.last_group == GroupRecord("q", 3, '{"p": 1}', winner.group)
    await winner.close()


@groups_only
async def test_a_batch_is_committed_once(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey
) -> None:
    name = str(await topic())
    first = await begun(key)
    await write(client, name, first, "once")
    await key.commit_group("n", first.group, [Winner(first.id, {})], query="q", batch=0)
    assert await key.begin_attempt("m", query="q", batch=0) is None
    replayed = await begun(key, "m")
    await write(client, name, replayed, "twice")
    done = await key.commit_group(
        "m", replayed.group, [Winner(replayed.id, {})], query="q", batch=0
    )
    assert done == CommittedGroup(True, first.group)
    assert await visible(client, name) == ["once"]
    empty = await key.commit_group("e", None, [], query="q", batch=1, positions="p")
    assert not empty.done
    async with client.transaction_key(key.name) as next_key:
        assert next_key.last_group == GroupRecord("q", 1, "p", empty.group)


@groups_only
async def test_workers_join_by_key_and_epoch(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey, service: Service
) -> None:
    name = str(await topic(segments=2))
    async with magnetar.connect(service.url) as worker:
        joined = await worker.attach_transaction_key(key.name, key.epoch)
        attempt = await begun(joined)
        await write(worker, name, attempt, "a", "b", "c")
        winner = Winner(attempt.id, {})
    await key.commit_group("n", winner.attempt.group, [winner], query="q", batch=0)
    assert await visible(client, name) == ["a", "b", "c"]


@groups_only
async def test_opening_a_key_fences_its_former_holders(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey
) -> None:
    name = str(await topic())
    attempt = await begun(key)
    await write(client, name, attempt, "lost")
    async with client.transaction_key(key.name) as successor:
        assert successor.last_group is None
        assert await visible(client, name) == []
        with pytest.raises(TransactionKeyFenced):
            await key.commit_group("n", attempt.group, [], query="q", batch=0)
        assert key.is_fenced
        with pytest.raises(TransactionKeyFenced):
            await key.begin_attempt("m")
        assert not await key.abort_group()
        later = await begun(successor, "m")
        assert not await later_abort_of_the_old(client, key)
        await write(client, name, later, "kept")
        await successor.commit_group("m", later.group, [Winner(later.id, {})], query="q", batch=0)
    assert await visible(client, name) == ["kept"]


async def later_abort_of_the_old(client: magnetar.Client, old: TransactionKey) -> bool:
    """An abort hook of the old epoch, in a process of its own."""
    try:
        async with client.attach_transaction_key(old.name, old.epoch) as key:
            return await key.abort_group()
    except TransactionKeyFenced:
        return False


@groups_only
async def test_an_aborted_group_is_over(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey
) -> None:
    name = str(await topic())
    attempt = await begun(key)
    await write(client, name, attempt, "lost")
    assert await key.abort_group()
    assert not await key.abort_group()
    with pytest.raises(InvalidTransactionStatus):
        await key.commit_group("n", attempt.group, [Winner(attempt.id, {})], query="q", batch=0)
    with pytest.raises(InvalidTransactionStatus):
        await key.extend_group(attempt.group, 10)
    assert not key.is_fenced
    late = client.producer(name, schema=str)
    async with late as producer:
        producer.send_nowait("late", transaction=attempt)
        with pytest.raises(magnetar.MagnetarError):
            await attempt.settled()
    assert await visible(client, name) == []


@groups_only
async def test_one_group_at_a_time(client: magnetar.Client, key: TransactionKey) -> None:
    await begun(key)
    with pytest.raises(InvalidTransactionStatus):
        await key.begin_attempt("another")
    with pytest.raises(InvalidTransactionStatus):
        await client.transaction(key=key)
    assert await key.abort_group()
    await begun(key, "another")


@groups_only
async def test_winners_must_be_attempts_that_were_begun(key: TransactionKey) -> None:
    attempt = await begun(key)
    never = magnetar.TxnId(attempt.id.most, attempt.group.least | 500_000 << 44)
    with pytest.raises(NotAllowed):
        await key.commit_group("n", attempt.group, [Winner(never, {})], query="q", batch=0)
    assert not key.is_fenced
    assert await key.abort_group()


@groups_only
async def test_many_tasks_write_to_many_segments(key: TransactionKey, service: Service) -> None:
    """What each wrote where is more than a command takes: then what was written where is told."""
    attempts = [await begun(key) for _ in range(200)]
    of = "segment://public/default/the-orders-of-all-shops-in-europe"
    counts = {f"{of}/{n:04x}-{n:04x}-{n}": SegmentCount(100_000, 2**63 + n) for n in range(64)}
    winners = [Winner(attempt.id, counts) for attempt in attempts]
    group = attempts[0].group
    for _ in range(2):
        done = await key.commit_group("n", group, winners, query="q", batch=0, positions="p")
        assert done == CommittedGroup(False, group)
    async with aiohttp.ClientSession() as session:
        url = f"{service.admin_url}/admin/v3/transactions/headers/committed"
        async with session.get(url) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    (told,) = [each for each in lines if each.get("txnId") == f"{group.most}_{group.least}"]
    commit = told["group"]["commit"]
    assert len(commit["winners"]) == len(winners)
    assert {segment: total[0] for segment, total in commit["totals"].items()} == dict.fromkeys(
        counts, 100_000 * len(winners)
    )


@groups_only
async def test_a_group_ends_by_its_deadline_unless_it_is_extended(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey
) -> None:
    name = str(await topic())
    attempt = await begun(key, timeout_s=0.3)
    await write(client, name, attempt, "kept")
    await key.extend_group(attempt.group, 60.0)
    await asyncio.sleep(1.0)  # the deadline that it had is over
    await key.commit_group("n", attempt.group, [Winner(attempt.id, {})], query="q", batch=0)
    short = await begun(key, "m", timeout_s=0.5)
    await write(client, name, short, "lost")
    assert await visible(client, name) == ["kept"]
    with pytest.raises(InvalidTransactionStatus):
        await key.commit_group("m", short.group, [Winner(short.id, {})], query="q", batch=1)


@groups_only
async def test_acknowledgement_in_an_attempt_is_decided_with_it(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey
) -> None:
    name = str(await topic())
    async with client.producer(name, schema=str, batching=False) as producer:
        for value in ("kept", "again"):
            await producer.send(value)
    winner, loser = await begun(key), await begun(key)
    async with client.queue_consumer(name, "s", schema=str, initial_position=EARLIEST) as consumer:
        for attempt in (winner, loser):
            await consumer.ack(await consumer.receive(timeout_s=20), transaction=attempt)
            await attempt.settled()
    await key.commit_group("n", winner.group, [Winner(winner.id, {})], query="q", batch=0)
    async with client.queue_consumer(name, "s", schema=str) as consumer:
        assert (await consumer.receive(timeout_s=20)).value == "again"
        assert await consumer.receive_batch(1, NOTHING_S) == []


@groups_only
async def test_segments_that_are_sealed_meanwhile(
    client: magnetar.Client, topic: MakeTopic, key: TransactionKey
) -> None:
    made = await topic()
    attempt = await begun(key)
    values = [f"v{n}" for n in range(200)]
    async with client.producer(made.name, schema=str) as producer:
        for n, value in enumerate(values):
            producer.send_nowait(value, key=value, transaction=attempt)
            if n == 100:
                await made.split(0)
        await attempt.settled()
    await key.commit_group("n", attempt.group, [Winner(attempt.id, {})], query="q", batch=0)
    assert await visible(client, made.name) == sorted(values)


@groups_only
async def test_threads_have_groups(service: Service, topic: MakeTopic) -> None:
    name = str(await topic())
    with magnetar.sync.connect(service.url) as client:
        key = client.transaction_key(f"job-{uuid.uuid4().hex}")
        attempt = key.begin_attempt("n", timeout_s=30)
        assert attempt is not None
        with client.producer(name, schema=str) as producer:
            futures = [
                producer.send_nowait(f"{n}", key=f"{n}", transaction=attempt) for n in range(50)
            ]
            attempt.settled()
            assert all(future.done() for future in futures)
        key.extend_group(attempt.group, 60)
        winner = Winner(attempt.id, {})
        done = key.commit_group("n", attempt.group, [winner], query="q", batch=0)
        assert not done.done
        assert not key.abort_group()
        attempt.close()
        with client.checkpoint_consumer(name, schema=str) as consumer:
            came = [consumer.receive(20).value for _ in range(50)]
        assert sorted(came) == sorted(f"{n}" for n in range(50))
        with client.transaction_key(key.name) as again:
            assert again.last_group == GroupRecord("q", 0, None, attempt.group)
