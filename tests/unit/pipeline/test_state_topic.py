"""What an opener makes of intents that it cannot end."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

import magnetar
from magnetar.errors import TransactionNotFound
from magnetar.transactions.txn_id import TxnId
from pipeline.errors import StateUnreadable
from pipeline.key_log import Entry, EntryKind, KeyState
from pipeline.state_topic import KeyLog, ReadSoFar


def test_a_transaction_of_another_role_is_not_taken_for_one_that_has_ended() -> None:
    """What it may still commit nobody else may write."""
    txn = TxnId(1, 2)

    async def end_transaction(id: TxnId, *, commit: bool) -> None:
        raise TransactionNotFound(
            f"Client (b) is neither the owner of the transaction {id} nor a super user"
        )

    state = KeyState().after(Entry(EntryKind.OPEN, "a"))
    state = state.after(Entry(EntryKind.INTENT, "driver", 0, txn))
    known = ReadSoFar((0, 1), state.after(Entry(EntryKind.OPEN, "b")))
    log = KeyLog(
        cast("magnetar.Client", SimpleNamespace(end_transaction=end_transaction)),
        "k",
        "b",
        lambda state: True,
        known,
        cast("magnetar.Producer[bytes]", None),
        cast("magnetar.CheckpointConsumer[bytes]", None),
    )
    with pytest.raises(StateUnreadable, match="another role"):
        asyncio.run(log.read_up_to((0, 1)))
