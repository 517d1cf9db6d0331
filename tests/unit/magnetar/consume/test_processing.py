"""What the application has for too long, at a broker made of calls."""

import asyncio

import pytest

from magnetar.consume.message import RawMessage
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import NackDelay
from magnetar.errors import InvalidArgument
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.magnetar.consume.setting import (
    FakeTransaction,
    Kind,
    Setting,
    attached_anew,
    pieces,
)


def hand_out(setting: Setting, *messages: RawMessage[SegmentConsumer]) -> None:
    for each in messages:
        setting.consumer.begin_processing(each)


async def asked_for(setting: Setting) -> list[int]:
    """The entries of the next command that asks for some."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (again := setting.said(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES)):
            await asyncio.sleep(0.001)
    (command,) = again
    return [each.entry_id for each in command.redeliver_unacknowledged_messages.message_ids]


class TestProcessing:
    """What the application has for too long; the entry that is handed out last is asked for."""

    async def test_message_is_requested_again_after_the_processing_timeout(self) -> None:
        setting = await Setting(processing_timeout_ms=50).open()
        loop = asyncio.get_running_loop()
        (message,) = setting.deliver(1, b"a")
        handed_out_at = loop.time()
        hand_out(setting, message)
        assert await asked_for(setting) == [1]
        assert loop.time() - handed_out_at >= 0.05
        await setting.consumer.close()

    async def test_only_what_is_handed_out_and_not_done_with_is_asked_for(self) -> None:
        setting = await Setting(processing_timeout_ms=20, nack_delay=NackDelay(60_000)).open()
        (waits,), (acked,), (nacked,), (held,), (late,) = (
            setting.deliver(at, b"a") for at in range(5)
        )
        hand_out(setting, acked, nacked, held, late)
        setting.consumer.acknowledge_received(acked)
        setting.consumer.nack_handed_out(nacked.entry_id, 0)
        await setting.consumer.acknowledge(held.entry_id, FakeTransaction())
        assert await asked_for(setting) == [4]
        hand_out(setting, waits)
        assert await asked_for(setting) == [0]
        await setting.consumer.close()

    async def test_a_batch_is_asked_for_once_and_what_is_acknowledged_is_said_before(self) -> None:
        setting = await Setting(processing_timeout_ms=20, nack_delay=NackDelay(0, 0)).open()
        first, *others = setting.deliver(1, b"a", b"b", b"c")
        hand_out(setting, first, *others)
        setting.consumer.acknowledge_received(first)
        async with asyncio.timeout(TIMEOUT_S):
            kinds: list[int] = []
            while Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES not in kinds:
                kinds.append((await setting.connection.sent.get()).type)
        assert kinds.index(Kind.ACK) < kinds.index(Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES)
        setting.consumer.nack_handed_out(others[0].entry_id, 0)
        (message,) = setting.deliver(2, b"d")
        hand_out(setting, message)
        assert await asked_for(setting) == [2]
        await setting.consumer.close()

    async def test_all_pieces_are_asked_for_and_acknowledged_late_all_the_same(self) -> None:
        setting = await Setting(processing_timeout_ms=20, ack_grouping_ms=0).open()
        for entry_id, piece in enumerate(pieces(b"XXYY")):
            setting.hand_in(entry_id, piece)
        (message,) = setting.taken()
        hand_out(setting, message)
        assert await asked_for(setting) == [0, 1]
        setting.consumer.acknowledge_received(message)
        (ack,) = setting.said(Kind.ACK)
        assert sorted(each.entry_id for each in ack.ack.message_id) == [0, 1]
        await setting.consumer.close()

    async def test_a_nacked_message_of_the_batch_is_not_asked_for_twice(self) -> None:
        setting = await Setting(processing_timeout_ms=20, nack_delay=NackDelay(40, 40)).open()
        first, second = setting.deliver(1, b"a", b"b")
        hand_out(setting, first, second)
        setting.consumer.nack_handed_out(first.entry_id, 0)
        assert await asked_for(setting) == [1]
        assert len(setting.consumer._nacked) == 0
        await setting.consumer.close()

    async def test_timeout_restarts_after_a_failed_transactional_ack(self) -> None:
        setting = await Setting(processing_timeout_ms=20).open()
        (message,) = setting.deliver(1, b"a")
        hand_out(setting, message)
        setting.connection.refusals.append(InvalidArgument("The test refuses it; try again."))
        with pytest.raises(InvalidArgument):
            await setting.consumer.acknowledge(message.entry_id, FakeTransaction())
        assert await asked_for(setting) == [1]
        await setting.consumer.close()

    async def test_all_pieces_are_asked_for_when_a_transaction_could_not_acknowledge(self) -> None:
        setting = await Setting(processing_timeout_ms=20).open()
        for entry_id, piece in enumerate(pieces(b"XXYY")):
            setting.hand_in(entry_id, piece)
        (message,) = setting.taken()
        hand_out(setting, message)
        setting.connection.refusals.append(InvalidArgument("The test refuses it; try again."))
        with pytest.raises(InvalidArgument):
            await setting.consumer.acknowledge(message.entry_id, FakeTransaction())
        assert await asked_for(setting) == [0, 1]
        await setting.consumer.close()

    async def test_timeout_continues_over_a_reconnect(self) -> None:
        setting = await Setting(processing_timeout_ms=1000).open()
        hand_out(setting, *setting.deliver(1, b"a"))
        await attached_anew(setting)
        assert setting.deliver(1, b"a") == []
        assert await asked_for(setting) == [1]
        assert len(setting.deliver(1, b"a")) == 1
        await setting.consumer.close()

    async def test_message_that_times_out_without_a_connection_comes_after_the_reconnect(
        self,
    ) -> None:
        setting = await Setting(processing_timeout_ms=20).open()
        hand_out(setting, *setting.deliver(1, b"a"))
        timeouts = setting.consumer._timeouts
        assert timeouts is not None
        await setting.without_connection()
        await until(lambda: not len(timeouts))
        await attached_anew(setting)
        assert len(setting.deliver(1, b"a")) == 1
        await setting.consumer.close()

    async def test_the_end_forgets_it(self) -> None:
        setting = await Setting(processing_timeout_ms=20).open()
        timeouts = setting.consumer._timeouts
        assert timeouts is not None
        hand_out(setting, *setting.deliver(3, b"a"))
        await setting.consumer.close()
        assert (len(timeouts), setting.consumer._timer._handle) == (0, None)
