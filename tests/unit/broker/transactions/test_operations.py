"""What operators see and do: REST and `magnetar txn` over a whole broker."""

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from broker.admin.app import AdminServer
from broker.app.service import Broker
from config.bounds import TXN_LISTED
from magnetar.cli.main import build_app
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.store import Version
from tests.support.bounds import set_bound
from tests.support.commands import run_command
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import Rest
from tests.unit.broker.transactions.conftest import TransactionClient
from txn.records import (
    ACKS_INDEX,
    WRITES_INDEX,
    AckedPosition,
    AckRecord,
    Claim,
    Header,
    TxnState,
)
from txn.store import StoredHeader

BASE = "/admin/v3/transactions"
TOPIC = "persistent://public/default/t"


class Site:
    """A broker, its REST interface, a client, and the command line."""

    def __init__(self, broker: Broker, rest: Rest, client: TransactionClient, url: str) -> None:
        self.broker = broker
        self.rest = rest
        self.client = client
        self.url = url

    async def txn(self, *arguments: str) -> tuple[int, str]:
        """`magnetar txn ...`: its status and what it printed."""
        words = ["txn", *arguments, "--admin-url", self.url]
        result = await run_command(build_app(), words)
        return result.exit_code, result.output

    async def send(self, txn: tuple[int, int], count: int = 1) -> None:
        """Messages in the transaction, over the wire."""
        await self.client.add_partitions(txn, TOPIC)
        producer = await self.client.raw.create_producer(TOPIC)
        for _ in range(count):
            await producer.send(
                b"x",
                send=pb.CommandSend(txnid_most_bits=txn[0], txnid_least_bits=txn[1]),
                metadata=pb.MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1]),
            )
        await producer.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with running(tmp_path) as broker:
        admin = AdminServer(broker)
        await admin.start()
        client = TransactionClient(await RawClient.open("127.0.0.1", broker.port))
        try:
            async with aiohttp.ClientSession() as session:
                rest = Rest(session, admin.port, broker.port)
                yield Site(broker, rest, client, f"http://127.0.0.1:{admin.port}")
        finally:
            await client.raw.close()
            await admin.stop()


async def test_open_transactions_the_oldest_first(site: Site) -> None:
    begun = [await site.client.begin(tc) for tc in (3, 1, 3)]
    answer = await site.rest.get(f"{BASE}/open?limit=2")
    assert isinstance(answer, dict)
    assert answer["open"] == 3
    assert len(answer["transactions"]) == 2
    assert {row["txnId"] for row in answer["transactions"]} <= {f"{a}_{b}" for a, b in begun}
    ages = [row["ageMs"] for row in answer["transactions"]]
    assert ages == sorted(ages, reverse=True)
    of_one = await site.rest.get(f"{BASE}/open?coordinatorId=1")
    assert isinstance(of_one, dict)
    assert [row["txnId"] for row in of_one["transactions"]] == ["1_0"]
    assert "out of bounds" in await site.rest.refused(412, "GET", f"{BASE}/open?limit=0")
    assert "no transaction coordinator 99" in await site.rest.refused(
        404, "GET", f"{BASE}/open?coordinatorId=99"
    )
    status, printed = await site.txn("list")
    assert status == 0
    assert printed.splitlines()[-1] == "3 open, 3 shown."
    assert re.search(r"^1_0 +OPEN +\d+s +\d+s +-$", printed, re.M)


async def test_one_transaction_with_what_it_touches(site: Site) -> None:
    txn = TxnId(*await site.client.begin(2))
    store = site.broker.transactions.store
    await store.put_claim(Claim(txn, "segment://a/b/c/0000-ffff-0", 4, Position(7, 8)))
    acks = tuple(AckedPosition(Position(1, number)) for number in range(7))
    await store.put_ack(AckRecord(txn, TOPIC, "sub", 1, 1, False, acks))
    shown = await site.rest.get(f"{BASE}/transaction/2/{txn.least}")
    assert isinstance(shown, dict)
    assert shown["writes"] == [
        {"segment": "segment://a/b/c/0000-ffff-0", "epoch": 4, "floor": "7:8"}
    ]
    assert len(shown["acknowledgements"][0]["positions"]) == 7
    status, printed = await site.txn("show", f"({txn.most},{txn.least})")
    assert status == 0
    assert "writes to segment://a/b/c/0000-ffff-0 after 7:8" in printed
    assert "1:4 and 2 more on persistent://public/default/t for sub" in printed
    pulsar = await site.rest.get(f"{BASE}/transactionMetadata/2/{txn.least}")
    assert isinstance(pulsar, dict)
    assert pulsar["txnId"] == f"(2,{txn.least})"
    assert pulsar["status"] == "OPEN"
    assert pulsar["producedPartitions"] == {
        "segment://a/b/c/0000-ffff-0": {"startPosition": "7:8", "aborted": False}
    }
    assert pulsar["ackedPartitions"] == {TOPIC: {"sub": {"cumulativeAckPosition": None}}}
    assert "no transaction 2_4711" in await site.rest.refused(
        404, "GET", f"{BASE}/transaction/2/4711"
    )
    status, printed = await site.txn("show", "nonsense")
    assert status == 2


async def test_why_lists_the_transactions_that_pin_a_topic(site: Site) -> None:
    await site.rest.done("PUT", "/admin/v2/scalable/public/default/s?numInitialSegments=2")
    status, printed = await site.txn("why", "s")
    assert status == 0
    assert "No open transaction on any of 2 segment(s)" in printed
    txn = await site.client.begin(5)
    await site.send(txn, 3)
    answer = await site.rest.get(f"{BASE}/why/{TOPIC.replace('://', '/')}")
    assert isinstance(answer, dict)
    (segment,) = answer["segments"]
    assert segment["segment"] == TOPIC
    assert segment["open"] == 1
    assert segment["heldBack"] is True
    assert segment["horizon"] != segment["lastConfirmed"]
    (pin,) = segment["transactions"]
    assert (pin["txnId"], pin["entries"], pin["status"]) == (f"5_{txn[1]}", 3, "OPEN")
    status, printed = await site.txn("why", TOPIC)
    assert status == 0
    assert f"5_{txn[1]}" in printed
    assert "magnetar txn end" in printed
    status, printed = await site.txn("end", f"5_{txn[1]}", "abort")
    assert (status, printed) == (0, f"Transaction 5_{txn[1]} is aborted.\n")
    topic = site.broker.topics.loaded()[TOPIC]
    await until(lambda: not topic.buffer.open_transactions())
    status, printed = await site.txn("why", TOPIC)
    assert "No open transaction" in printed
    assert "does not exist" in await site.rest.refused(
        404, "GET", f"{BASE}/why/persistent/public/default/none"
    )


async def test_ending_by_hand(site: Site) -> None:
    first, second = await site.client.begin(0), await site.client.begin(0)
    await site.rest.done("POST", f"{BASE}/end/0/{first[1]}?action=commit")
    await site.rest.done("POST", f"{BASE}/abortTransaction/0/{second[1]}")
    store = site.broker.transactions.store
    states = [await store.read_header(TxnId(*txn)) for txn in (first, second)]
    assert [each.header.state for each in states if each is not None] == [
        TxnState.COMMITTED,
        TxnState.ABORTED,
    ]
    assert "COMMITTED already" in await site.rest.refused(
        409, "POST", f"{BASE}/end/0/{first[1]}?action=abort"
    )
    assert "commit or abort" in await site.rest.refused(412, "POST", f"{BASE}/end/0/0?action=x")
    assert "no transaction" in await site.rest.refused(404, "POST", f"{BASE}/abortTransaction/0/99")
    status, printed = await site.txn("end", "0_99", "abort")
    assert status == 1
    assert "no transaction 0_99" in printed


async def test_an_operator_ends_what_a_principal_began(site: Site) -> None:
    coordinators = site.broker.transactions.coordinators
    txn = await coordinators.begin(CoordinatorId(0), 60_000, "alice")
    await site.rest.done("POST", f"{BASE}/end/0/{txn.least}?action=abort")
    assert coordinators.open_transactions() == []


async def test_pulsars_own_paths(site: Site) -> None:
    found = await site.rest.get(f"{BASE}/coordinators")
    assert isinstance(found, list)
    assert found[3] == {"id": 3, "brokerServiceUrl": site.broker.placement.broker_url}
    await site.client.begin(3)
    stats = await site.rest.get(f"{BASE}/coordinatorStats?coordinatorId=3")
    assert isinstance(stats, dict)
    assert (stats["state"], stats["ongoingTxnSize"], stats["leastSigBits"]) == ("Ready", 1, 0)
    slow = await site.rest.get(f"{BASE}/slowTransactions/0")
    assert isinstance(slow, dict)
    assert slow["(3,0)"]["timeoutAt"] == 60_000
    assert await site.rest.get(f"{BASE}/slowTransactions/100000") == {}


async def test_switched_off_is_503(tmp_path: Path) -> None:
    async with running(tmp_path, transactions_enabled=False) as broker:
        admin = AdminServer(broker)
        await admin.start()
        try:
            async with aiohttp.ClientSession() as session:
                rest = Rest(session, admin.port, broker.port)
                assert "transactions_enabled" in await rest.refused(503, "GET", f"{BASE}/open")
        finally:
            await admin.stop()


READS = ("get", "get_many", "scan", "scan_index", "children")


class Counted:
    """Calls of the metadata store that read, with the limits of scans of indexes.

    Scans that have nothing to do with what a segment takes part in may come from rounds of work in
    the background, and are not counted.
    """

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.limits: list[int | None] = []
        for name in READS:
            monkeypatch.setattr(broker.metadata, name, self._counted(name, broker))

    def _counted(self, name: str, broker: Broker) -> Callable[..., object]:
        real = getattr(broker.metadata, name)

        def call(*given: object, **more: object) -> object:
            if name == "scan_index" and given[0] not in (WRITES_INDEX, ACKS_INDEX):
                return real(*given, **more)
            self.calls.append(name)
            if name == "scan_index":
                self.limits.append(more.get("limit"))  # type: ignore[arg-type]
            return real(*given, **more)

        return call


def adopt(site: Site, count: int) -> list[TxnId]:
    """Open transactions in memory only, the oldest last."""
    now_ms = site.broker.clock.now_ms()
    many = [
        StoredHeader(
            TxnId(0, 10**6 + n),
            Header(TxnState.OPEN, 600_000 + 1000 * n, now_ms - 1000 * n),
            Version(1),
        )
        for n in range(count)
    ]
    site.broker.transactions.coordinators.led()[0].adopt(many)
    return [stored.txn for stored in reversed(many)]


async def test_lists_of_ten_thousand_are_short_and_read_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of them, with how many there are."""
    oldest = adopt(site, 10_000)
    led = site.broker.transactions.coordinators.led()
    await until(lambda: all(one.keys.tally is not None for one in led))  # the first round
    read = Counted(site.broker, monkeypatch)
    answer = await site.rest.get(f"{BASE}/open?coordinatorId=0")
    assert isinstance(answer, dict)
    assert answer["open"] == 10_000
    assert [each["txnId"] for each in answer["transactions"]] == [str(txn) for txn in oldest[:100]]
    slow = await site.rest.get(f"{BASE}/slowTransactions/0")
    assert isinstance(slow, dict)
    assert list(slow) == [f"({txn.most},{txn.least})" for txn in oldest[:TXN_LISTED]]
    assert read.calls == []
    assert "out of bounds" in await site.rest.refused(
        412, "GET", f"{BASE}/open?limit={TXN_LISTED + 1}"
    )
    status, printed = await site.txn("list", "--limit", "5")
    assert status == 0
    assert printed.splitlines()[-1] == "10000 open, 5 shown."


async def test_why_lists_transactions_of_a_loaded_topic_from_memory(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pins most comes first, and no more than is shown is put together."""
    set_bound(monkeypatch, "TXN_PINS_SHOWN", 3)
    txns = [await site.client.begin(n) for n in range(5)]
    for txn in txns:
        await site.send(txn)
    read = Counted(site.broker, monkeypatch)
    answer = await site.rest.get(f"{BASE}/why/{TOPIC.replace('://', '/')}")
    assert isinstance(answer, dict)
    (segment,) = answer["segments"]
    assert (segment["open"], segment["more"]) == (5, False)
    shown = [each["txnId"] for each in segment["transactions"]]
    assert shown == [f"{most}_{least}" for most, least in txns[:3]]
    assert "scan_index" not in read.calls
    status, printed = await site.txn("why", TOPIC)
    assert status == 0
    assert "5 transaction(s), 3 shown" in printed


async def test_of_segments_that_are_not_loaded_few_claims_are_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all no more than of one; what is open is not looked up in the store."""
    await site.rest.done("PUT", "/admin/v2/scalable/public/default/s?numInitialSegments=2")
    answer = await site.rest.get(f"{BASE}/why/topic/public/default/s")
    assert isinstance(answer, dict)
    names = [each["segment"] for each in answer["segments"]]
    for name in names:
        await site.broker.topics.unload(parse_topic_name(name))
    store = site.broker.transactions.store
    oldest = adopt(site, 150)
    for n, txn in enumerate(oldest):
        await store.put_claim(Claim(txn, names[0], 1, Position(1, n)))
    set_bound(monkeypatch, "TXN_PINS_SHOWN", 50)
    set_bound(monkeypatch, "TXN_CLAIMS_READ", 240)
    read = Counted(site.broker, monkeypatch)
    answer = await site.rest.get(f"{BASE}/why/topic/public/default/s")
    assert isinstance(answer, dict)
    first, second = answer["segments"]
    assert read.limits == [120, 120]
    assert (first["open"], first["more"], len(first["transactions"])) == (120, True, 50)
    floors = [int(each["floor"].partition(":")[2]) for each in first["transactions"]]
    assert floors == sorted(floors)
    assert (second["open"], second["more"], second["transactions"]) == (0, False, [])
    assert not any(each["loaded"] for each in (first, second))
    assert len(read.calls) < 10
    status, printed = await site.txn("why", "s")
    assert status == 0
    assert "120 or more transaction(s), 50 shown" in printed
