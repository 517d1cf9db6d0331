"""A key's log as it is read: intents that cannot be ended, and for how long it is waited."""

import asyncio
import random
from types import SimpleNamespace
from typing import cast

import pytest

import magnetar
from magnetar.errors import InvalidArgument, OperationTimedOut, TransactionNotFound
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.errors import StateUnreadable
from magnetar.spark.key_log import Entry, EntryKind, KeyState, MessageRef, digest_of, text_of
from magnetar.spark.plain_groups import open_state
from magnetar.spark.state_topic import APPEND_TRIES, READ_S, KeyLog, ReadSoFar
from tests.simulation.loop import SimulatedLoop


def log_of(
    known: ReadSoFar, client: object = None, reader: object = None, producer: object = None
) -> KeyLog:
    return KeyLog(
        cast("magnetar.Client", client),
        "k",
        "b",
        lambda state: True,
        known,
        cast("magnetar.Producer[bytes]", producer),
        cast("magnetar.CheckpointConsumer[bytes]", reader),
    )


@pytest.mark.parametrize("name", ["", "a&b", "k" * 10_000])
def test_key_of_a_state_topic_has_the_names_of_a_brokers_key(name: str) -> None:
    nobody = cast("magnetar.Client", None)
    with pytest.raises(InvalidArgument, match="cannot be named"):
        asyncio.run(open_state(nobody, "topic://public/default/state", name, -1, "nonce"))


def test_transaction_of_another_role_is_not_taken_for_ended() -> None:
    """What it may still commit nobody else may write."""
    txn = TxnId(1, 2)

    async def end_transaction(id: TxnId, *, commit: bool) -> None:
        raise TransactionNotFound(
            f"Client (b) is neither the owner of the transaction {id} nor a super user"
        )

    state = KeyState().after(Entry(EntryKind.OPEN, "a"))
    state = state.after(Entry(EntryKind.INTENT, "driver", 0, txn))
    known = ReadSoFar(place=(0, 1), state=state.after(Entry(EntryKind.OPEN, "b")))
    log = log_of(known, SimpleNamespace(end_transaction=end_transaction))
    with pytest.raises(StateUnreadable, match="another role"):
        asyncio.run(log.read_up_to(MessageRef((0, 1), "")))


def test_long_log_is_read_as_long_as_entries_arrive() -> None:
    """A pause in it is no transaction that hides the rest."""
    numbers = iter((0, 1, 2, None, 3))

    async def receive_batch(most: int, timeout_s: float) -> list[object]:
        await asyncio.sleep(READ_S / 2)
        number = next(numbers)
        if number is None:
            return []
        value = text_of(Entry(EntryKind.OPEN, f"n{number}")).encode()
        place = SimpleNamespace(entry=SimpleNamespace(key=(0, number)))
        return [SimpleNamespace(key="k", value=value, id=place)]

    loop = SimulatedLoop(random.Random(1))
    asyncio.set_event_loop(loop)
    try:
        log = log_of(ReadSoFar(), reader=SimpleNamespace(receive_batch=receive_batch))
        reading = loop.spawn(loop.new_host("client"), log.read_up_to(MessageRef((0, 3), "")))
        assert loop.run_until_complete(reading).epoch == 3
    finally:
        loop.bury()
        asyncio.set_event_loop(None)


@pytest.mark.parametrize("unknown", [0, 1, APPEND_TRIES])
def test_entry_without_a_known_position_is_written_again(unknown: int) -> None:
    """A broker that knows what is sent again says that it has it, not where; nowhere is no place
    up to which anything could be read."""
    sent: list[bytes] = []

    async def send(value: bytes, *, key: str) -> object:
        sent.append(value)
        place = (0, 7) if len(sent) > unknown else (-1, -1)
        return SimpleNamespace(entry=SimpleNamespace(key=place))

    entry = Entry(EntryKind.INTENT, "driver", 0, TxnId(1, 2))
    log, value = log_of(ReadSoFar(), producer=SimpleNamespace(send=send)), text_of(entry).encode()
    if unknown < APPEND_TRIES:
        assert asyncio.run(log.append(entry)) == MessageRef((0, 7), digest_of(value))
        assert sent == [value] * (unknown + 1)
    else:
        with pytest.raises(OperationTimedOut, match="did not say where"):
            asyncio.run(log.append(entry))
        assert len(sent) == APPEND_TRIES
