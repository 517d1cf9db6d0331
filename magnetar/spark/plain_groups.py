"""Attempts and decisions where brokers have no groups of transactions: one task, one transaction.

Rules:

- P1 One task writes: the transactions of several tasks would be committed one by one.  More tasks
  are refused before they write.
- P2 Each try of the task is a transaction of its own, begun by the task and ended by the driver.  A
  try that fails aborts it.  An orphaned one (its process died, or Spark has chosen another try) is
  aborted by the coordinator at its deadline, which cannot be extended: readers wait for it.
- P3 The driver commits the transaction with the key's record in it, as `key_log.py` says.  A batch
  is done if the log says so, and only then.
- P4 The commit is sent again while its answer may be lost.  If the answer does not tell the
  outcome, the log does: either the record can be read, or a message after it without the record.
- P5 An abort tries to abort the transactions that the tasks have reported; the deadline ends those
  that it cannot abort.
"""

import os
from collections.abc import Sequence
from typing import Final

from magnetar import AttachedTransaction, Client, GroupRecord, TxnId
from magnetar.errors import (
    InvalidTransactionStatus,
    MagnetarError,
    TransactionKeyFenced,
)
from magnetar.spark.attempt_writer import Task
from magnetar.spark.commit import Decision
from magnetar.spark.errors import CommitRefused, StateUnreadable
from magnetar.spark.key_log import ANY_EPOCH, Entry, EntryKind, KeyState, Verdict
from magnetar.spark.sink_options import StateOption, TransactionKeyOption
from magnetar.spark.state_topic import KeyLog, ReadSoFar, abort_quietly, keep
from magnetar.transactions.key_holder import check_key_name

__all__ = ["PlainGroups", "open_state", "too_many_tasks"]

EMPTY_BATCH_S: Final = 60.0
"""The deadline of the transaction of a batch without rows."""


def too_many_tasks(tasks: int) -> CommitRefused:
    """The error for a batch of several tasks, which cannot be exactly-once here (P1)."""
    return CommitRefused(
        f"The batch is written by {tasks} tasks, and these brokers have no groups of transactions: "
        "one task alone can write exactly once. Write a frame.coalesce(1), or say that rows may "
        'come twice: .option("delivery", "at-least-once").'
    )


class PlainGroups:
    """`Attempts` and `Groups`, over plain transactions and a state topic."""

    def __init__(
        self,
        client: Client,
        key: TransactionKeyOption,
        state: StateOption,
        known: ReadSoFar,
        reported: Sequence[TxnId] = (),
        *,
        timeout_s: float | None = None,
    ) -> None:
        """`known`: the part of the key's log that was read; `reported`: transactions of tasks.

        `timeout_s`: the timeout with which tasks begin transactions; None: not known.
        """
        self._client = client
        self._key = key
        self._state = state
        self._nonce = os.urandom(16).hex()
        self._known = known
        self._reported = reported
        self._timeout_ms = None if timeout_s is None else int(max(timeout_s, EMPTY_BATCH_S) * 1000)

    async def begin(self, task: Task, timeout_s: float) -> AttachedTransaction:
        """Begin a transaction (P2).  Raises `CommitRefused` in any task but the first one."""
        # Partitions count from 0: a second task learns here that it is one too many (P1).
        if task.partition:
            raise too_many_tasks(task.partition + 1)
        txn = await self._client.begin_transaction(timeout_s=timeout_s)
        return self._client.attach_transaction(txn)

    async def extend(self, group: TxnId, timeout_s: float) -> None:
        """Do nothing: the deadline of a plain transaction cannot be extended."""

    async def abandon(self, attempt: TxnId) -> None:
        """Abort the transaction of a failed try (P2).  Raises nothing."""
        await abort_quietly(self._client, attempt)

    async def commit(self, decision: Decision, positions: str | None) -> bool:
        """See `Groups.commit`; also raises `StateUnreadable` and `OperationTimedOut`."""
        if len(decision.winners) > 1:
            raise too_many_tasks(len(decision.winners))
        txn = next((winner.attempt for winner in decision.winners), None)
        if txn is None:
            txn = await self._client.begin_transaction(timeout_s=EMPTY_BATCH_S)
        try:
            async with KeyLog.opened(
                self._client,
                self._state.topic,
                self._key.name,
                self._nonce,
                entitled=lambda state: state.epoch == self._key.epoch,
                known=self._known,
            ) as log:
                return await self._commit(log, txn, decision, positions)
        except BaseException:
            await abort_quietly(self._client, txn)
            raise

    async def abort(self) -> bool:
        """Abort the reported transactions (P5); whether any was aborted."""
        return any([await abort_quietly(self._client, txn) for txn in self._reported])

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _commit(
        self, log: KeyLog, txn: TxnId, decision: Decision, positions: str | None
    ) -> bool:
        epoch, query, batch = self._key.epoch, decision.query, decision.batch
        # The intent first, then the state up to it decides (L3, P3).
        intent = Entry(EntryKind.INTENT, self._nonce, epoch, txn, timeout_ms=self._timeout_ms)
        state = await log.read_up_to(await log.append(intent), own=txn)
        match state.verdict(epoch, query, batch, positions):
            case Verdict.DONE:
                await abort_quietly(self._client, txn)
                return True
            case Verdict.WRITE:
                record = GroupRecord(query, batch, positions, txn)
                async with self._client.attach_transaction(txn) as attached:
                    # In the transaction of the rows: it is committed with them or not at all (L4).
                    entry = Entry(EntryKind.RECORD, self._nonce, epoch, txn, record)
                    await log.record(entry, attached)
                    await attached.settled()
                await self._end(log, txn)
                return False
            case refused:
                raise self._refusal(refused, state, query, batch)

    async def _end(self, log: KeyLog, txn: TxnId) -> None:
        """Commit the transaction, and learn its outcome from the log if need be (P4)."""
        try:
            await self._client.end_transaction(txn, commit=True)
        except MagnetarError as error:
            state = await log.read_up_to(await log.mark(), own=txn)
            if log.has_recorded(txn):
                return
            if state.epoch > self._key.epoch:
                raise _fenced_error(self._key.name, self._key.epoch, state.epoch) from error
            raise InvalidTransactionStatus(
                f"Transaction {txn} was not committed ({error}) Its time was up, or somebody "
                "has aborted it: start the query again."
            ) from error

    def _refusal(
        self, verdict: Verdict, state: KeyState, query: str, batch: int
    ) -> MagnetarError | StateUnreadable:
        name, epoch = self._key.name, self._key.epoch
        if verdict is Verdict.FENCED:
            return _fenced_error(name, epoch, state.epoch)
        if verdict is Verdict.DIFFERS:
            return InvalidTransactionStatus(
                f"Batch {batch} of query {query!r} was committed under key {name!r} with other "
                "positions: this one is of a checkpoint that lost its last batch, or was put "
                "back. Begin with a new checkpoint, at the positions that the key has."
            )
        return StateUnreadable(
            f"The state topic {self._state.topic} knows epoch {state.epoch} of key {name!r}, this "
            f"query has {epoch}: messages of the state topic are lost. Check which batches the "
            "target topic has, and open the key again."
        )


async def open_state(
    client: Client,
    topic: str,
    name: str,
    expected: int,
    nonce: str,
    known: ReadSoFar | None = None,
) -> tuple[KeyState, StateOption]:
    """Open a key in a state topic (L2): its state with the new epoch, and the option for sinks.

    `expected` is the epoch that the key must have had, or -1; `known` is the part of its log that
    was read before.
    Raises `TransactionKeyFenced`, `StateUnreadable`, `NotSupported` where there are no
    transactions, `InvalidArgument` for a name that cannot be, and `OperationTimedOut`.
    """
    check_key_name(name)

    def entitled(state: KeyState) -> bool:
        if nonce in state.openers:
            return state.opener == nonce
        return expected in (ANY_EPOCH, state.epoch)

    known = ReadSoFar() if known is None else known
    async with KeyLog.opened(client, topic, name, nonce, entitled=entitled, known=known) as log:
        await keep(client, topic)
        at = await log.append(Entry(EntryKind.OPEN, nonce, expected))
        state = await log.read_up_to(at)
        if state.opener != nonce:
            raise _fenced_error(name, expected, state.epoch)
        start = await log.append(state.state_entry(nonce))
        last = await log.read_up_to(start)
        if last.opener != nonce:
            raise _fenced_error(name, state.epoch, last.epoch)
        return last, StateOption(topic, start)


def _fenced_error(name: str, epoch: int, newest: int) -> TransactionKeyFenced:
    return TransactionKeyFenced(
        f"Transaction key {name!r} has another epoch than {epoch}: {newest}. Stop this process, "
        "or open the key anew."
    )
