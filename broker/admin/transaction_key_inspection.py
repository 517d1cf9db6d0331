"""Inspection of transaction keys by operators."""

import asyncio
import re

from broker.app.service import Broker
from config.bounds import TXN_KEY_BYTES, TXN_KEYS_LISTED
from magnetar.protocol.txn_id import CoordinatorId
from txn.errors import InvalidTransactionKey
from txn.group import GroupRecord
from txn.key_groups import fold_commit
from txn.key_store import StoredKey, TransactionKeyStore
from txn.records import TxnState
from txn.transaction_key import KeyRecord

Json = dict[str, object]
_NAME_LENGTH = 2 * 3 * TXN_KEY_BYTES + 1
_PLACE = re.compile(rf"([0-9]{{1,6}}):([0-9A-Za-z_.*+%&-]{{0,{_NAME_LENGTH}}})")
"""A position in the list: a coordinator, and an encoded name or nothing."""


class TransactionKeyInspection:
    """Lists and shows transaction keys for operators.

    Keys are read from the store, so any broker lists those of all coordinators.  The number of
    connections that use a key is known only to the leader of its coordinator, and null elsewhere.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._transactions = broker.transactions

    async def keys(self, after: str, limit: int, *, owner: str | None = None) -> Json:
        """A page of keys behind `after`, by coordinator and name; `next` is for the next page.

        With an `owner`: of the keys that belong to this role.  A page has at most TXN_KEYS_LISTED.
        Raises `InvalidTransactionKey` if `after` is no `next`.
        """
        first, name = 0, ""
        if after:
            found = _PLACE.fullmatch(after)
            if found is None:
                raise InvalidTransactionKey(
                    f"after = {after!r} is no place in the list: give the value of `next`."
                )
            first, name = int(found.group(1)), found.group(2)
        rows: list[tuple[CoordinatorId, StoredKey]] = []
        next_place: str | None = None
        for number in range(first, self._transactions.coordinators.parallelism):
            coordinator = CoordinatorId(number)
            store = TransactionKeyStore(self._transactions.store.metadata, coordinator)
            left = min(limit, TXN_KEYS_LISTED) - len(rows)
            page, name = await store.page(name, left, owner=owner)
            rows += [(coordinator, each) for each in page]
            if name:
                next_place = f"{number}:{name}"
                break
        shown = await asyncio.gather(*(self.row(*each) for each in rows))
        return {"keys": shown, "next": next_place}

    async def row(
        self, coordinator: CoordinatorId, stored: StoredKey, *, whole: bool = False
    ) -> Json:
        """One key; only with `whole` its positions, which may be long."""
        record, now_ms = stored.record, self._broker.clock.now_ms()
        state, record = await self._now(record)
        return {
            "owner": stored.name.owner,
            "key": stored.name.key,
            "coordinatorId": coordinator,
            "epoch": record.epoch,
            "transactionId": None if record.last is None else str(record.last.txn),
            "transactionState": None if state is None else state.value,
            "createdMs": record.created_ms,
            "ageMs": max(0, now_ms - record.created_ms),
            "lastUsedMs": record.last_used_ms,
            "idleMs": max(0, now_ms - record.last_used_ms),
            "connections": self._connections(coordinator, stored),
            "lastGroup": None
            if record.committed is None
            else _group(record.committed, whole=whole),
        }

    async def _now(self, record: KeyRecord) -> tuple[TxnState | None, KeyRecord]:
        """The state of a key's last transaction, and the record with what that committed (G5)."""
        last = record.last
        if last is None or last.ended is not None:
            return None if last is None else last.ended, record
        stored = await self._transactions.store.read_header(last.txn)
        if stored is None:
            return None, record
        return stored.header.state, fold_commit(record, last.txn, stored.header)

    def _connections(self, coordinator: CoordinatorId, stored: StoredKey) -> int | None:
        for one in self._transactions.coordinators.led():
            if one.coordinator_id == coordinator:
                return one.keys.holders.count_of(stored.name)
        return None


def _group(committed: GroupRecord, *, whole: bool) -> Json:
    return {
        "groupId": str(committed.group),
        "query": committed.batch.query,
        "batch": committed.batch.number,
        **({"positions": committed.positions} if whole else {}),
    }
