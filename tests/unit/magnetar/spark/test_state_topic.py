"""A key's log as it is read: intents that cannot be ended, and for how long it is waited."""

import asyncio
import random
import time
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
from txn.header import not_found_text


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


@pytest.mark.parametrize(
    ("timeout_ms", "age_s", "ended"),
    [
        (60_000, 300, False),
        (60_000, 900, True),
        (3_600_000, 900, False),
        (None, 900, False),
        (None, 25 * 3600, True),
    ],
)
def test_transaction_that_is_not_found_counts_as_ended_long_after_its_deadline(
    timeout_ms: int | None, age_s: int, ended: bool
) -> None:
    """Brokers do not tell whether another role has it open, or it ended long ago."""
    txn, intent_ms = TxnId(1, 2), int(time.time() - age_s) * 1000
    entries = [
        Entry(EntryKind.OPEN, "a"),
        Entry(EntryKind.INTENT, "driver", 0, txn, timeout_ms=timeout_ms),
        Entry(EntryKind.OPEN, "b"),
        Entry(EntryKind.MARK, "b"),
    ]
    messages = [
        SimpleNamespace(
            key="k",
            value=text_of(entry).encode(),
            id=SimpleNamespace(entry=SimpleNamespace(key=(0, number))),
            publish_time_ms=intent_ms,
        )
        for number, entry in enumerate(entries)
    ]

    async def end_transaction(id: TxnId, *, commit: bool) -> None:
        raise TransactionNotFound(not_found_text(id))

    async def receive_batch(most: int, timeout_s: float) -> list[object]:
        found, messages[:] = messages[:3], messages[3:]
        return list(found)

    async def send(value: bytes, *, key: str) -> object:
        return SimpleNamespace(entry=SimpleNamespace(key=(0, 3)))

    log = log_of(
        ReadSoFar(),
        SimpleNamespace(end_transaction=end_transaction),
        SimpleNamespace(receive_batch=receive_batch),
        SimpleNamespace(send=send),
    )
    reading = log.read_up_to(MessageRef((0, 2), ""))
    if ended:
        assert asyncio.run(reading).epoch == 1
    else:
        with pytest.raises(StateUnreadable, match="another role"):
            asyncio.run(reading)


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
