"""Groups of attempts on the wire: what is written in them, and what is seen of it."""

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.server_error import ServerError
from magnetar.protocol.txn_id import NUMBER_BITS, TxnId
from tests.support.embedded_broker import running
from tests.support.group_client import GroupClient
from tests.support.raw_client import BrokerError
from tests.support.waiting import until
from tests.unit.broker.transactions.conftest import Connect, Kind, TransactionClient
from tests.unit.broker.transactions.test_operations import Site, site
from tests.unit.broker.transactions.test_transaction_keys import BASE, refused
from tests.unit.broker.transactions.test_writes import read_to, reader

__all__ = ["site"]

KEY = "job"
TC = coordinator_of_key(KEY, 16)
TOPIC = "persistent://public/default/out"
INVALID = ServerError.INVALID_TXN_STATUS
NOT_FOUND = ServerError.TRANSACTION_NOT_FOUND
NOT_ALLOWED = ServerError.NOT_ALLOWED_ERROR


@pytest.fixture
async def first(connect: Connect) -> GroupClient:
    client = GroupClient(await connect(), KEY)
    await client.open()
    return client


async def readable(client: GroupClient, topic: str = TOPIC) -> list[bytes]:
    """What is delivered of a topic from its start, up to a plain message that is sent after it."""
    producer = await client.raw.create_producer(topic)
    await producer.send(b"end")
    consumer = await reader(client.raw, topic, producer.name)
    return (await read_to(consumer, b"end"))[:-1]


async def test_groups_are_offered_while_transactions_are_on(
    first: GroupClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert first.raw.connected.transaction_groups
    directory = tmp_path_factory.mktemp("off")
    async with running(directory, transactions_enabled=False) as broker:
        client = GroupClient(await first.raw.open("127.0.0.1", broker.port), KEY, epoch=0)
        assert not client.raw.connected.transaction_groups
        for request in (
            lambda: client.begin_attempt("n"),
            lambda: client.commit("n", None),
            client.abort,
            lambda: client.extend(1, 1),
        ):
            with refused(NOT_ALLOWED):
                await request()
        await client.raw.close()


async def test_of_a_group_its_winners_are_seen(broker: Broker, first: GroupClient) -> None:
    begun = await first.begin_attempt("n")
    assert begun.txnid_most_bits == TC
    assert begun.txnid_least_bits >> NUMBER_BITS == 1
    assert begun.txnid_least_bits & ((1 << NUMBER_BITS) - 1) == begun.group_least_bits
    assert begun.deadline_ms >= broker.clock.now_ms() + 50_000
    winner = (TC, begun.txnid_least_bits)
    loser = await first.attempt("n")
    for attempt, rows in ((winner, (b"a", b"b")), (loser, (b"x", b"y"))):
        await first.add(attempt, TOPIC)
        for row in rows:
            await first.send(attempt, TOPIC, row)
    other = await first.attempt("n")
    await first.send(other, TOPIC, b"c")
    counts = {winner[1]: {TOPIC: (2, 2**64 - 1)}, other[1]: {TOPIC: (1, 5)}}
    answer = await first.commit("n", begun.group_least_bits, counts, ("q", 3), "at 7")
    assert not answer.done
    assert answer.group_least_bits == begun.group_least_bits
    assert await readable(first) == [b"a", b"b", b"c"]
    again = await first.commit("n", begun.group_least_bits, counts, ("q", 3), "at 7")
    assert (again.done, again.group_least_bits) == (False, begun.group_least_bits)
    opened = await first.open()
    assert opened.last_group == pb.GroupRecord(
        query="q",
        batch=3,
        positions="at 7",
        txnid_least_bits=begun.group_least_bits,
        txnid_most_bits=TC,
    )
    assert opened.last_committed


async def test_an_old_epoch_is_refused_and_its_group_aborted(
    first: GroupClient, connect: Connect
) -> None:
    attempt = await first.attempt("n")
    await first.send(attempt, TOPIC, b"lost")
    zombie = GroupClient(await connect(), KEY, epoch=0)
    second = GroupClient(await connect(), KEY)
    assert not (await second.open()).HasField("last_group")
    group = TxnId(*attempt).group.least
    for late in (
        lambda: zombie.begin_attempt("n"),
        lambda: zombie.begin_attempt("other"),
        lambda: zombie.commit("n", group, [attempt[1]]),
        lambda: zombie.commit("other", None),
        lambda: zombie.extend(group, 1000),
        lambda: zombie.add(attempt, TOPIC),
    ):
        with refused(NOT_ALLOWED):
            await late()
    assert not await zombie.abort()
    with pytest.raises(BrokerError):
        await zombie.send(attempt, TOPIC, b"late")
    assert await readable(second) == []


async def test_done_batches_are_not_written_again(first: GroupClient) -> None:
    begun = await first.begin_attempt("n", ("q", 0))
    assert not begun.done
    await first.commit("n", begun.group_least_bits, [begun.txnid_least_bits], ("q", 0))
    hinted = await first.begin_attempt("m", ("q", 0))
    assert hinted.done
    assert not hinted.HasField("txnid_least_bits")
    unhinted = await first.begin_attempt("m")
    answer = await first.commit("m", unhinted.group_least_bits, [unhinted.txnid_least_bits])
    assert (answer.done, answer.group_least_bits) == (True, begun.group_least_bits)
    with refused(INVALID):
        await first.begin_attempt("m")
    assert not await first.abort(), "it is aborted already"
    empty = await first.commit("e", None, batch=("q", 1), positions="p")
    assert not empty.done
    assert (await first.open()).last_group.batch == 1


async def test_invalid_group_request_is_answered_with_its_own_response(first: GroupClient) -> None:
    attempt = await first.attempt("n")
    group = TxnId(*attempt).group.least
    for wrong, code in (
        (lambda: first.begin_attempt("other"), INVALID),
        (lambda: first.begin_attempt(""), NOT_ALLOWED),
        (lambda: first.begin_attempt("x" * 257), NOT_ALLOWED),
        (lambda: first.begin(""), INVALID),
        (lambda: first.begin("n"), INVALID),
        (lambda: first.end(attempt), INVALID),
        (lambda: first.end(attempt, pb.ABORT), INVALID),
        (lambda: first.end((TC, group)), INVALID),
        (lambda: first.add((TC, group), TOPIC), INVALID),
        (lambda: first.add((TC, group | 1000 << NUMBER_BITS), TOPIC), NOT_FOUND),
        (lambda: first.commit("n", group + 1, []), INVALID),
        (lambda: first.commit("other", None, []), INVALID),
        (lambda: first.commit("n", group, [group]), NOT_ALLOWED),
        (lambda: first.commit("n", group, [group | 1000 << NUMBER_BITS]), NOT_ALLOWED),
        (lambda: first.commit("n", group, [], ("", 0)), NOT_ALLOWED),
        (lambda: first.commit("n", group, [], ("q", -1)), NOT_ALLOWED),
        (lambda: first.extend(attempt[1], 1000), NOT_ALLOWED),
        (lambda: first.extend(group + 1, 1000), NOT_FOUND),
    ):
        with refused(code):
            await wrong()
    twice = [pb.SegmentCount(segment="s", messages=1)] * 2
    for winners, totals in (
        ([pb.GroupWinner(attempt_least_bits=attempt[1], counts=twice)], []),
        ([pb.GroupWinner(attempt_least_bits=attempt[1])], twice),
    ):
        answer = await TransactionClient(first.raw).raw_answer(
            Kind.COMMIT_GROUP,
            pb.CommandCommitGroup(
                request_id=9,
                tc_id=TC,
                key=KEY,
                epoch=0,
                nonce="n",
                query="q",
                batch=0,
                winners=winners,
                totals=totals,
            ),
        )
        body = answer.commit_group_response
        assert (body.request_id, body.txnid_most_bits, body.error) == (9, TC, pb.NotAllowedError)
    await first.extend(group, 1000)
    await first.end((TC, group), pb.ABORT)
    with refused(INVALID):
        await first.extend(group, 1000)
    with refused(INVALID):
        await first.commit("n", group, [attempt[1]])


async def test_acknowledgements_of_winners_are_kept(first: GroupClient, broker: Broker) -> None:
    source = "persistent://public/default/in"
    producer = await first.raw.create_producer(source)
    consumer = await first.raw.subscribe(source, "s", permits=10)
    messages = []
    for payload in (b"0", b"1", b"2"):
        await producer.send(payload)
        messages.append(await consumer.receive())
    winner, loser = await first.attempt("n"), await first.attempt("n")
    for txn, message in ((winner, messages[0]), (loser, messages[1])):
        await first.add_subscription(txn, source, "s")
        ack = pb.CommandAck(
            consumer_id=consumer.consumer_id,
            ack_type=pb.CommandAck.Individual,
            message_id=[message.message_id],
            txnid_most_bits=txn[0],
            txnid_least_bits=txn[1],
        )
        await first.raw.request(Kind.ACK, ack)
    await first.commit("n", TxnId(*winner).group.least, [winner[1]])
    subscription = broker.topics.loaded()[source].subscriptions["s"]
    transactional = subscription.transactional
    assert transactional is not None
    await until(lambda: not transactional.pending.busy)
    core = transactional.pending.core
    assert (core.commits, core.aborts) == (1, 1)
    consumer.flow(10)
    assert (await consumer.receive()).payload == b"1", "the loser's is delivered again"


async def test_operators_see_groups_and_the_last_committed_batch(site: Site) -> None:
    client = GroupClient(site.client.raw, KEY)
    await client.open()
    winner, loser = await client.attempt("n"), await client.attempt("n")
    group = TxnId(*winner).group
    for attempt in (winner, loser):
        await client.send(attempt, TOPIC, b"x")
    status, printed = await site.txn("why", TOPIC)
    assert status == 0
    assert printed.count(f"of group {group}") == 2
    status, printed = await site.txn("end", str(TxnId(*winner)), "abort")
    assert status == 1
    assert f"abort the group, {group}" in printed
    status, printed = await site.txn("list")
    assert f"{group} " in printed
    status, printed = await site.txn("show", str(group))
    assert "a group, of nonce n, with 64 attempts reserved" in printed
    assert printed.count(f"writes to {TOPIC}") == 2
    assert "committed batch" not in printed
    status, printed = await site.txn("show", str(TxnId(*loser)))
    assert printed.count(f"writes to {TOPIC}") == 1
    counts = {winner[1]: {TOPIC: (1, 9)}}
    await client.commit("n", group.least, counts, ("q", 3), "at 7")
    status, printed = await site.txn("show", str(group))
    assert "committed batch 3 of query q, with 1 attempts" in printed
    assert f"of which 1 messages are on {TOPIC}" in printed
    shown = await site.rest.get(f"{BASE}/{KEY}")
    assert isinstance(shown, dict)
    assert shown["transactionState"] == "COMMITTED"
    assert shown["lastGroup"] == {
        "groupId": str(group),
        "query": "q",
        "batch": 3,
        "positions": "at 7",
    }
    (row,) = (await site.rest.get(BASE))["keys"]  # type: ignore[index]
    assert "positions" not in row["lastGroup"], "of a thousand keys they would be long"
    status, printed = await site.txn("keys", "get", KEY)
    assert f"last committed: batch 3 of query q, by group {group}" in printed
    assert "with positions at 7" in printed
    await client.begin_attempt("m")
    shown = await site.rest.get(f"{BASE}/{KEY}")
    assert isinstance(shown, dict)
    assert (shown["transactionState"], shown["lastGroup"]["batch"]) == ("OPEN", 3)


@pytest.mark.parametrize("rows", [1, 40])
async def test_an_epoch_costs_writes_by_tasks_and_segments_and_not_by_rows(
    first: GroupClient, broker: Broker, rows: int
) -> None:
    """Header, key, a claim for each task and segment, commit; for losers one for each segment."""
    topics = [f"persistent://public/default/counted-{n}" for n in range(3)]
    producers = [await first.raw.create_producer(topic) for topic in topics]

    async def epoch(nonce: str, tasks: int, losers: int, batch: int) -> None:
        attempts = [await first.attempt(nonce) for _ in range(tasks)]
        for most, least in attempts:
            for producer in producers:
                for _ in range(rows):
                    await producer.send(
                        b"x",
                        send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
                        metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
                    )
        winners = [least for _, least in attempts[losers:]]
        await first.commit(nonce, TxnId(*attempts[0]).group.least, winners, ("q", batch))
        loaded = broker.topics.loaded()
        await until(lambda: all(loaded[topic].buffer.idle for topic in topics))

    await epoch("the first takes the segments' epochs", 1, 0, 0)
    for number, (tasks, losers) in enumerate(((1, 0), (4, 0), (4, 2))):
        puts, deletes = broker.metadata.puts.asked, broker.metadata.deletes.asked
        await epoch(f"{number}", tasks, losers, number + 1)
        assert broker.metadata.puts.asked - puts == 3 + (tasks + losers) * len(topics)
        assert broker.metadata.deletes.asked - deletes == tasks * len(topics)
