"""The transactions that a role began, without a broker."""

import asyncio
from dataclasses import dataclass, field

from broker.transactions.own_transactions import OwnTransactions
from config.bounds import OWN_TRANSACTIONS
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.server_error import MagnetarError, ServerError
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import MetadataError, Version
from txn.errors import TransactionNotFound
from txn.records import Header, TxnState
from txn.store import StoredHeader

OWN, FOREIGN, NONE, OWNERLESS = (TxnId(0, number) for number in range(4))
OWNERS = {OWN: "alice", FOREIGN: "bob", OWNERLESS: None}


@dataclass
class World:
    """Stored headers, and which of them a coordinator here has open."""

    here: set[TxnId] = field(default_factory=set)
    reads: list[tuple[TxnId, bool]] = field(default_factory=list)
    reported: list[tuple[BaseCommand.Type, TxnId]] = field(default_factory=list)
    dry_run: bool = False
    fails: bool = False
    lags: bool = False
    """Whether a read that is not fresh is of the past."""

    def __post_init__(self) -> None:
        self.tasks = BackgroundTasks()
        self.own = OwnTransactions("alice", self, self, self.tasks, self.report)

    def find_open(self, txn: TxnId) -> StoredHeader | None:
        return self.stored(txn) if txn in self.here else None

    async def read_header(self, txn: TxnId, *, fresh: bool = False) -> StoredHeader | None:
        self.reads.append((txn, fresh))
        await asyncio.sleep(0)
        if self.fails:
            raise MetadataError("The store is gone.")
        return None if self.lags and not fresh else self.stored(txn)

    def stored(self, txn: TxnId) -> StoredHeader | None:
        if txn not in OWNERS and txn.least < 100:
            return None
        header = Header(TxnState.OPEN, 1, 1, owner=OWNERS.get(txn, "alice"))
        return StoredHeader(txn, header, Version(1))

    def report(self, command: BaseCommand.Type, txn: TxnId) -> bool:
        self.reported.append((command, txn))
        return self.dry_run

    async def answer_to_send(self, txn: TxnId) -> MagnetarError | None:
        answered: asyncio.Future[MagnetarError | None] = asyncio.Future()
        self.own.check_send(txn, answered.set_result)
        return await answered


async def test_header_of_an_own_transaction_is_read_once() -> None:
    world = World()
    assert not world.own.is_own(OWN)
    sends = [world.answer_to_send(OWN) for _ in range(3)]
    assert await asyncio.gather(*sends, world.own.refusal_of_ack(OWN)) == [None] * 4
    assert world.own.is_own(OWN)
    assert world.reads == [(OWN, False)]


async def test_no_header_is_read_where_the_coordinator_is_led() -> None:
    world = World(here={OWN, FOREIGN, OWNERLESS})
    assert [each for each in OWNERS if world.own.is_own(each)] == [OWN]
    assert OWN in world.own.known
    assert world.reads == []


async def test_transaction_that_began_just_now_is_found_though_reads_lag() -> None:
    assert await World(lags=True).answer_to_send(OWN) is None


async def test_foreign_unknown_and_ownerless_transactions_get_one_answer_after_the_same_reads() -> (
    None
):
    sends: set[tuple[ServerError, str]] = set()
    acks: set[tuple[ServerError, str]] = set()
    reads: set[tuple[bool, ...]] = set()
    for txn in (FOREIGN, NONE, OWNERLESS):
        world = World(here={FOREIGN})
        for answers, refusal in (
            (sends, await world.answer_to_send(txn)),
            (acks, await world.own.refusal_of_ack(txn)),
        ):
            assert refusal is not None
            answers.add((refusal.code, str(refusal).replace(str(txn), "TXN")))
        reads.add(tuple(fresh for _, fresh in world.reads))
        assert not world.own.is_own(txn)
        audited = [] if txn == NONE else [(BaseCommand.SEND, txn), (BaseCommand.ACK, txn)]
        assert world.reported == audited
    assert {code for code, _ in sends} == {ServerError.NOT_ALLOWED_ERROR}
    assert {code for code, _ in acks} == {TransactionNotFound.code}
    assert {words for _, words in sends} == {words for _, words in acks}
    assert reads == {(False, True, False, True)}


async def test_dry_run_reports_a_foreign_transaction_once_and_lets_it_pass() -> None:
    world = World(dry_run=True)
    assert await world.answer_to_send(FOREIGN) is None
    assert world.own.is_own(FOREIGN)
    assert world.reported == [(BaseCommand.SEND, FOREIGN)]
    assert isinstance(await world.own.refusal_of_ack(NONE), TransactionNotFound)


async def test_failed_read_is_the_answer_and_is_repeated_with_the_next_send() -> None:
    world = World(fails=True)
    assert isinstance(await world.answer_to_send(OWN), MetadataError)
    assert isinstance(await world.own.refusal_of_ack(OWN), MetadataError)
    world.fails = False
    assert await world.answer_to_send(OWN) is None


async def test_sends_are_answered_when_the_broker_stops() -> None:
    world = World()
    answered: asyncio.Future[MagnetarError | None] = asyncio.Future()
    world.own.check_send(OWN, answered.set_result)
    await world.tasks.stop()
    for refusal in (
        await answered,
        await world.answer_to_send(OWN),
        await world.own.refusal_of_ack(OWN),
    ):
        assert refusal is not None
        assert refusal.code is ServerError.SERVICE_NOT_READY


async def test_number_of_remembered_transactions_is_bounded() -> None:
    world = World()
    for number in range(100, 101 + OWN_TRANSACTIONS):
        assert await world.answer_to_send(TxnId(0, number)) is None
    assert len(world.own.known) == OWN_TRANSACTIONS
    assert TxnId(0, 100) not in world.own.known
