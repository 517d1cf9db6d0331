"""One SUBSCRIBE at a broker made of calls: closing, losing connections, acknowledgements."""

import asyncio
import gc
from typing import Literal

import pytest

from magnetar.consume.message import RawMessage
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import NackDelay, SubscriptionKind
from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    InvalidArgument,
    OperationTimedOut,
    TransactionConflict,
)
from magnetar.message_id import EntryId
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.magnetar.consume.setting import (
    FakeTransaction,
    Kind,
    Setting,
    attached_anew,
    closed_by_the_broker,
    pieces,
    single,
    turns,
)
from tests.unit.magnetar.layout.fakes import FakeConnection


class Spinless(asyncio.Event):
    """Who waits for it again and again, though it is set, fails instead of stopping the loop."""

    async def wait(self) -> Literal[True]:
        self.waits = getattr(self, "waits", 0) + 1
        assert self.waits < 100, "it spins"
        return await super().wait()


def come_again(setting: Setting, entry_id: int) -> list[RawMessage[SegmentConsumer]]:
    """A batch of two as entry 1, a message alone as any other."""
    if entry_id == 1:
        return setting.deliver(entry_id, b"a", b"b")
    setting.hand_in(entry_id, single())
    return setting.taken()


async def acknowledging_up_to() -> tuple[Setting, asyncio.Future[None], asyncio.Future[None]]:
    """An ordered acknowledgement in a transaction, sent once the coordinator has `said` so."""
    setting = await Setting(SubscriptionKind.EXCLUSIVE, ack_grouping_ms=0).open()
    transaction = FakeTransaction()
    said = transaction.said = asyncio.get_running_loop().create_future()
    (message,) = setting.deliver(1, b"a")
    outcome = setting.consumer.acknowledge_up_to(message.entry_id, transaction)
    return setting, said, asyncio.ensure_future(outcome)


class TestClosing:
    @pytest.mark.parametrize("what", ["confirmed", "unsubscribe"])
    async def test_close_fails_calls_that_wait_for_a_connection(self, what: str) -> None:
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        await setting.without_connection()
        setting.consumer.acknowledge(message.entry_id)
        setting.consumer._up = Spinless()
        waiting = asyncio.create_task(getattr(setting.consumer, what)())
        await turns()
        await asyncio.wait_for(setting.consumer.close(), TIMEOUT_S)
        with pytest.raises(AlreadyClosed):
            await waiting

    async def test_waiting_for_a_connection_has_a_limit(self) -> None:
        setting = await Setting(operation_timeout_s=0.05).open()
        await setting.without_connection()
        waiting = asyncio.create_task(setting.consumer.unsubscribe())
        with pytest.raises(OperationTimedOut):
            await asyncio.wait_for(waiting, TIMEOUT_S)
        await setting.consumer.close()


class TestALostConnection:
    async def test_an_ordered_acknowledgement_in_a_transaction_is_not_sent_on_a_later_attachment(
        self,
    ) -> None:
        setting, said, outcome = await acknowledging_up_to()
        await attached_anew(setting)
        said.set_result(None)
        with pytest.raises(ConnectionLost):
            await outcome
        assert setting.said(Kind.ACK) == []
        await setting.consumer.close()

    async def test_an_ordered_acknowledgement_in_a_transaction_waits_for_no_attachment(
        self,
    ) -> None:
        setting, said, outcome = await acknowledging_up_to()
        await setting.without_connection()
        said.set_result(None)
        await turns()
        assert isinstance(outcome.exception(), ConnectionLost)
        await setting.consumer.close()

    async def test_consumers_that_share_a_full_inbox_all_come_back(self) -> None:
        first = await Setting().open()
        settings = [first, *[await Setting(beside=first).open() for _ in range(2)]]
        pool, inbox = first.pool, first.inbox
        for setting, count in ((settings[2], 10), (settings[0], 200)):
            for entry_id in range(count):
                setting.hand_in(entry_id, single())
        for _ in range(9):
            inbox.take_nowait()
        assert inbox.is_full
        lost, pool.connection = pool.connection, FakeConnection()
        lost.lose()
        async with asyncio.timeout(TIMEOUT_S):
            flows = [(await pool.connection.next(Kind.SUBSCRIBE)).subscribe.consumer_id]
            while len(flows) < 6:
                command = await pool.connection.sent.get()
                flows.append(command.flow.consumer_id or command.subscribe.consumer_id)
        assert sorted(flows) == sorted([each.consumer.consumer_id for each in settings] * 2)
        assert len(inbox) == 0
        for setting in settings:
            await setting.consumer.close()

    @pytest.mark.parametrize("same_connection", [True, False])
    async def test_a_message_refused_after_a_reconnect_is_handed_out_again(
        self, same_connection: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setting = await Setting().open()
        setting.hand_in(1, single())
        (message,) = setting.taken()
        asked, answered = asyncio.Event(), asyncio.Event()

        async def refuse(command: pb.BaseCommand, timeout_s: float | None = None) -> None:
            asked.set()
            await answered.wait()
            raise TransactionConflict("It is held; abort.")

        with monkeypatch.context() as patch:
            patch.setattr(setting.connection, "request", refuse)
            outcome = setting.consumer.acknowledge(message.entry_id, FakeTransaction())
            await asyncio.wait_for(asked.wait(), TIMEOUT_S)
        if same_connection:
            await closed_by_the_broker(setting)
        else:
            await attached_anew(setting)
        answered.set()
        with pytest.raises(TransactionConflict):
            await outcome
        setting.hand_in(1, single())
        assert len(setting.taken()) == 1
        await setting.consumer.close()

    async def test_nothing_is_asked_for_on_a_lost_one(self) -> None:
        setting = await Setting().open()
        setting.said(Kind.FLOW)
        setting.connection.is_lost = True
        setting.deliver(1, *[b"a"] * 10)
        setting.consumer.inbox_has_capacity()
        assert setting.said(Kind.FLOW) == []
        await setting.consumer.close()

    async def test_delivered_message_does_not_come_twice_after_a_reconnect(self) -> None:
        setting = await Setting(nack_delay=NackDelay(60_000, 60_000)).open()
        has, nacked, _ = setting.deliver(1, b"a", b"b", b"c")
        setting.hand_in(2, single())
        (alone,) = setting.taken()
        setting.hand_in(3, single(b"not taken"))
        setting.consumer.nack(nacked.entry_id, 0)
        await attached_anew(setting)
        assert [each.payload for each in setting.deliver(1, b"a", b"b", b"c")] == [b"b"]
        setting.hand_in(2, single())
        setting.hand_in(3, single(b"not taken"))
        assert [each.payload for each in setting.taken()] == [b"not taken"]
        for message in (has, alone):
            await setting.consumer.acknowledge(message.entry_id, FakeTransaction())
        await setting.consumer.close()

    async def test_message_nacked_without_a_connection_comes_after_the_reconnect(self) -> None:
        setting = await Setting().open()
        first, second = setting.deliver(1, b"a", b"b")
        setting.hand_in(2, single())
        (alone,) = setting.taken()
        await setting.without_connection()
        await turns()
        setting.consumer.nack(second.entry_id, 0)
        setting.consumer.nack(alone.entry_id, 0)
        await attached_anew(setting)
        assert [each.payload for each in setting.deliver(1, b"a", b"b")] == [b"b"]
        setting.hand_in(2, single())
        assert len(setting.taken()) == 1
        setting.consumer.acknowledge_received(first)
        await setting.consumer.close()


class TestAgain:
    async def test_a_message_comes_again_though_another_of_its_batch_is_acknowledged(self) -> None:
        setting = await Setting(nack_delay=NackDelay(0, 0)).open()
        first, second, third = setting.deliver(1, b"a", b"b", b"c")
        setting.consumer.nack(first.entry_id, 0)
        setting.consumer.nack(third.entry_id, 0)
        setting.consumer.acknowledge_received(second)
        setting.consumer.acknowledge(third.entry_id)
        async with asyncio.timeout(TIMEOUT_S):
            while not (again := setting.said(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES)):
                await asyncio.sleep(0)
        (entry,) = again[0].redeliver_unacknowledged_messages.message_ids
        assert (entry.ledger_id, entry.entry_id, list(entry.ack_set)) == (1, 1, [0b001])
        await setting.consumer.close()

    async def test_only_what_is_in_hand(self) -> None:
        setting = await Setting(nack_delay=NackDelay(0, 0)).open()
        first, second, third = setting.deliver(1, b"a", b"b", b"c")
        await setting.consumer.acknowledge(first.entry_id, FakeTransaction())
        setting.consumer.acknowledge_received(second)
        for message in (first, second, third):
            setting.consumer.nack(message.entry_id, 0)
        async with asyncio.timeout(TIMEOUT_S):
            while not (again := setting.said(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES)):
                await asyncio.sleep(0)
        (entry,) = again[0].redeliver_unacknowledged_messages.message_ids
        assert list(entry.ack_set) == [0b100]
        await setting.consumer.close()


class TestInATransaction:
    @pytest.mark.parametrize("how", ["acknowledge", "acknowledge_up_to"])
    async def test_refused_ack_leaves_the_message_unacknowledged(self, how: str) -> None:
        setting = await Setting(SubscriptionKind.EXCLUSIVE).open()
        first, second = setting.deliver(1, b"a", b"b")
        transaction = FakeTransaction()
        transaction.refusal = AlreadyClosed("It is being committed; begin another one.")
        acknowledge = getattr(setting.consumer, how)
        with pytest.raises(AlreadyClosed):
            acknowledge(first.entry_id, transaction)
        await turns()
        assert setting.said(Kind.ACK) == []
        assert setting.consumer._tracker.known == 1
        transaction.refusal = None
        for message in (first, second):
            await acknowledge(message.entry_id, transaction)
        assert len(setting.said(Kind.ACK)) == 2
        assert all(each.done() for each in transaction.tracked)
        assert len(transaction.tracked) == 2
        await setting.consumer.close()

    @pytest.mark.parametrize("fails", [False, True])
    async def test_what_comes_while_it_is_acknowledged_is_asked_for_afterwards(
        self, fails: bool
    ) -> None:
        setting = await Setting().open()
        first, _ = setting.deliver(1, b"a", b"b")
        transaction = FakeTransaction()
        if fails:
            setting.connection.refusals.append(TransactionConflict("It is held; abort."))
        acknowledging = asyncio.ensure_future(
            setting.consumer.acknowledge(first.entry_id, transaction)
        )
        setting.consumer.redeliver([first.entry_id])
        assert [each.payload for each in setting.deliver(1, b"a", b"b")] == [b"b"]
        setting.said(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES)
        await asyncio.wait((acknowledging,))
        assert (acknowledging.exception() is not None) == fails
        assert len(setting.said(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES)) == 1
        assert [each.payload for each in setting.deliver(1, b"a", b"b")] == [b"a"]
        await setting.consumer.close()

    async def test_what_an_abort_brings_in_one_read_with_the_answer_is_asked_for(self) -> None:
        setting = await Setting().open()
        first, _ = setting.deliver(1, b"a", b"b")
        setting.hand_in(2, single())
        (alone,) = setting.taken()
        for message, entry_id in ((first, 1), (alone, 2)):
            acknowledging = asyncio.ensure_future(
                setting.consumer.acknowledge(message.entry_id, FakeTransaction())
            )
            while not setting.said(Kind.ACK):
                await asyncio.sleep(0)
            # It is answered, but who waits for the answer has not had a turn of the loop since.
            assert not acknowledging.done()
            assert come_again(setting, entry_id) == []
            await acknowledging
            assert len(setting.said(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES)) == 1
            assert len(come_again(setting, entry_id)) == 1
        await setting.consumer.close()

    async def test_unawaited_ack_is_sent_and_tracked(self) -> None:
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        transaction = FakeTransaction()
        waiting = asyncio.ensure_future(setting.consumer.acknowledge(message.entry_id, transaction))
        waiting.cancel()
        await asyncio.wait(transaction.tracked)
        assert len(setting.said(Kind.ACK)) == 1
        assert transaction.tracked[0].exception() is None
        await setting.consumer.close()

    async def test_refused_unawaited_ack_logs_no_unhandled_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(command: pb.BaseCommand, timeout_s: float | None = None) -> None:
            raise TransactionConflict("Somebody else did it; abort.")

        reported: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, report: reported.append(report))
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        transaction = FakeTransaction()
        monkeypatch.setattr(setting.connection, "request", refuse)
        setting.consumer.acknowledge(message.entry_id, transaction)
        await turns()
        assert isinstance(transaction.tracked.pop().exception(), TransactionConflict)
        gc.collect()
        assert not reported
        await setting.consumer.close()

    async def test_close_fails_an_ack_not_sent_yet(self) -> None:
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        await setting.without_connection()
        transaction = FakeTransaction()
        outcome = setting.consumer.acknowledge(message.entry_id, transaction)
        await turns()
        await setting.consumer.close()
        with pytest.raises(AlreadyClosed):
            await outcome
        assert isinstance(transaction.tracked[0].exception(), AlreadyClosed)


class TestTheBrokersWord:
    @pytest.mark.parametrize("ack_grouping_ms", [0, 60_000])
    async def test_is_awaited_for_what_was_sent_before(self, ack_grouping_ms: int) -> None:
        setting = await Setting(ack_grouping_ms=ack_grouping_ms).open()
        for entry_id in range(3):
            (message,) = setting.deliver(entry_id, b"a")
            setting.consumer.acknowledge_received(message)
        outcomes = [asyncio.ensure_future(setting.consumer.confirmed()) for _ in range(2)]
        await turns()
        commands = setting.said(Kind.ACK)
        assert sum(len(each.ack.message_id) for each in commands) == 3
        for command in commands:
            assert not any(each.done() for each in outcomes)
            setting.answer(command)
            await turns()
        assert all(each.done() for each in outcomes)
        await asyncio.gather(*outcomes)
        await setting.consumer.close()

    @pytest.mark.parametrize("after", range(4))
    async def test_ack_is_sent_though_its_waiter_was_cancelled(self, after: int) -> None:
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        setting.consumer.acknowledge_received(message)
        waiting = asyncio.ensure_future(setting.consumer.confirmed())
        for _ in range(after):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await setting.consumer.close()
        assert len(setting.said(Kind.ACK)) == 1

    async def test_is_awaited_on_the_next_connection(self) -> None:
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        lost, setting.pool.connection = setting.connection, FakeConnection()
        lost.lose()
        setting.consumer.acknowledge_received(message)
        waiting = asyncio.ensure_future(setting.consumer.confirmed())
        async with asyncio.timeout(TIMEOUT_S):
            while (command := await setting.connection.sent.get()).type != Kind.ACK:
                pass
        await turns()
        assert not waiting.done()
        setting.answer(command)
        await asyncio.wait_for(waiting, TIMEOUT_S)
        await setting.consumer.close()

    async def test_is_not_known_of_what_a_lost_connection_had(self) -> None:
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        setting.consumer.acknowledge_received(message)
        waiting = asyncio.ensure_future(setting.consumer.confirmed())
        await turns()
        await setting.without_connection()
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(waiting, TIMEOUT_S)
        await setting.consumer.close()

    async def test_comes_after_the_consumer_was_closed(self) -> None:
        setting = await Setting().open()
        (message,) = setting.deliver(1, b"a")
        setting.consumer.acknowledge_received(message)
        waiting = asyncio.ensure_future(setting.consumer.confirmed())
        await turns()
        (command,) = setting.said(Kind.ACK)
        closing = asyncio.ensure_future(setting.consumer.close())
        await turns()
        assert len(setting.said(Kind.CLOSE_CONSUMER)) == 1
        setting.answer(command)
        await asyncio.wait_for(closing, TIMEOUT_S)
        await asyncio.wait_for(waiting, TIMEOUT_S)

    async def test_is_not_awaited_for_ever(self) -> None:
        setting = await Setting(operation_timeout_s=0.05).open()
        (message,) = setting.deliver(1, b"a")
        setting.consumer.acknowledge_received(message)
        with pytest.raises(OperationTimedOut):
            await asyncio.wait_for(setting.consumer.confirmed(), TIMEOUT_S)
        await setting.consumer.close()


class TestWhatIsHandedOut:
    @pytest.mark.parametrize(("durable", "kept"), [(True, 2), (False, 0)])
    async def test_is_remembered_only_where_it_can_be_acknowledged(
        self, durable: bool, kept: int
    ) -> None:
        setting = await Setting(SubscriptionKind.EXCLUSIVE, durable=durable).open()
        setting.deliver(1, b"a", b"b")
        assert len(setting.consumer._handed_out or ()) == kept
        await setting.consumer.close()


class TestPieces:
    """A message of several pieces lies across others."""

    async def test_those_before_a_message_are_not_acknowledged_with_it(self) -> None:
        setting = await Setting(SubscriptionKind.EXCLUSIVE, ack_grouping_ms=0).open()
        first, second = pieces(b"XXYY")
        setting.deliver(1, b"a")
        setting.hand_in(2, first)
        (message,) = setting.deliver(3, b"b")
        setting.consumer.acknowledge_up_to(message.entry_id)
        commands = setting.said(Kind.ACK)
        assert {each.entry_id for command in commands for each in command.ack.message_id} == {1, 3}
        assert {each.ack.ack_type for each in commands} == {pb.CommandAck.Individual}
        setting.hand_in(4, second)
        (whole,) = setting.taken()
        assert whole.payload == b"XXYY"
        setting.consumer.acknowledge_up_to(message.entry_id)
        assert [each.ack.ack_type for each in setting.said(Kind.ACK)] == [pb.CommandAck.Individual]
        setting.consumer.acknowledge_up_to(whole.entry_id)
        (last,) = setting.said(Kind.ACK)
        assert last.ack.ack_type == pb.CommandAck.Cumulative
        assert last.ack.message_id[0].entry_id == 4
        await setting.consumer.close()

    async def test_nor_with_it_in_a_transaction(self) -> None:
        setting = await Setting(SubscriptionKind.EXCLUSIVE, ack_grouping_ms=0).open()
        transaction = FakeTransaction()
        first, second = pieces(b"XXYY")
        setting.deliver(1, b"a")
        setting.hand_in(2, first)
        setting.deliver(3, b"b", b"c", b"d")
        inner, last = pieces(b"UUVV")
        setting.hand_in(4, inner)
        setting.hand_in(5, last)
        (message,) = setting.taken()
        await setting.consumer.acknowledge_up_to(message.entry_id, transaction)
        up_to, behind = setting.said(Kind.ACK)
        assert up_to.ack.ack_type == pb.CommandAck.Cumulative
        assert up_to.ack.message_id[0].entry_id == 1
        assert behind.ack.ack_type == pb.CommandAck.Individual
        assert [each.entry_id for each in behind.ack.message_id] == [3, 3, 3, 4, 5]
        assert behind.ack.txnid_least_bits == up_to.ack.txnid_least_bits == 2
        (message,) = setting.deliver(6, b"e")
        await setting.consumer.acknowledge_up_to(message.entry_id, transaction)
        (behind,) = setting.said(Kind.ACK)
        assert behind.ack.ack_type == pb.CommandAck.Individual
        assert [each.entry_id for each in behind.ack.message_id] == [6]
        setting.hand_in(7, second)
        (whole,) = setting.taken()
        await setting.consumer.acknowledge_up_to(whole.entry_id, transaction)
        (up_to,) = setting.said(Kind.ACK)
        assert up_to.ack.ack_type == pb.CommandAck.Cumulative
        assert up_to.ack.message_id[0].entry_id == 7
        await setting.consumer.close()

    async def test_what_is_in_front_of_both_is_acknowledged_once_in_a_transaction(self) -> None:
        setting = await Setting(SubscriptionKind.EXCLUSIVE, ack_grouping_ms=0).open()
        transaction = FakeTransaction()
        earlier, later = pieces(b"UUVV"), pieces(b"XXYY")
        setting.hand_in(1, earlier[0])
        setting.deliver(2, b"a")
        setting.hand_in(3, later[0])
        setting.hand_in(4, earlier[1])
        (message,) = setting.taken()
        await setting.consumer.acknowledge_up_to(message.entry_id, transaction)
        up_to, behind = setting.said(Kind.ACK)
        assert up_to.ack.message_id[0].entry_id == 2
        assert [each.entry_id for each in behind.ack.message_id] == [4]
        await setting.consumer.close()

    @pytest.mark.parametrize("in_transaction", [True, False])
    async def test_those_of_an_earlier_attachment_are_acknowledged_beside_it(
        self, in_transaction: bool
    ) -> None:
        setting = await Setting(SubscriptionKind.EXCLUSIVE, ack_grouping_ms=0).open()
        transaction = FakeTransaction() if in_transaction else None
        setting.hand_in(1, pieces(b"XXYY")[0])
        setting.deliver(2, b"a")
        (message,) = setting.deliver(3, b"b")
        lost, setting.pool.connection = setting.connection, FakeConnection()
        lost.lose()
        await until(lambda: setting.consumer.connection is not None, poll_s=0)
        await setting.consumer.acknowledge_up_to(message.entry_id, transaction)
        commands = setting.said(Kind.ACK)
        assert {each.entry_id for command in commands for each in command.ack.message_id} == {2, 3}
        assert {each.ack.ack_type for each in commands} == {pb.CommandAck.Individual}
        await setting.consumer.close()

    async def test_no_place_to_go_on_from_is_inside_a_message(self) -> None:
        setting = await Setting(SubscriptionKind.EXCLUSIVE, durable=False).open()
        first, second = pieces(b"XXYY")
        setting.hand_in(2, first)
        (message,) = setting.deliver(3, b"b")
        place = message.entry_id
        assert setting.consumer.before_open(place).key == (1, 1)
        setting.hand_in(4, second)
        assert setting.consumer.before_open(place).key == (1, 1)
        (whole,) = setting.taken()
        assert setting.consumer.before_open(whole.entry_id) == whole.entry_id
        setting.inbox.put_back(whole)
        assert setting.consumer.before_open(place).key == (1, 1)
        await setting.consumer.close()


async def test_an_id_without_the_size_of_its_batch_does_not_acknowledge_the_rest_of_it() -> None:
    setting = await Setting(SubscriptionKind.EXCLUSIVE).open()
    second = setting.deliver(0, b"a", b"b", b"c")[1].entry_id
    setting.consumer.acknowledge_up_to(second._replace(batch_size=0))
    with pytest.raises(InvalidArgument, match="not known"):
        setting.consumer.acknowledge_up_to(EntryId(1, 5, 1, 0))
    await setting.consumer.close()
    (sent,) = setting.said(Kind.ACK)
    assert [(each.batch_size, list(each.ack_set)) for each in sent.ack.message_id] == [(3, [0b100])]
