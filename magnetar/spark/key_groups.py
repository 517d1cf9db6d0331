"""Attempts and groups of a transaction key, as requests of the client."""

from magnetar import Attempt, Client, SegmentCount, TransactionKey, Winner
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.attempt_writer import Task
from magnetar.spark.commit import Decision
from magnetar.spark.sink_options import TransactionKeyOption

__all__ = ["KeyGroups"]


class KeyGroups:
    """`Attempts` and `Groups`, under one key and epoch, at brokers that have them."""

    def __init__(self, client: Client, key: TransactionKeyOption) -> None:
        self._client = client
        self._option = key
        self._key: TransactionKey | None = None

    async def begin(self, task: Task, timeout_s: float) -> Attempt | None:
        """See `Attempts.begin`."""
        key = await self._attached_key()
        return await key.begin_attempt(
            task.nonce, timeout_s=timeout_s, query=task.query, batch=task.batch
        )

    async def extend(self, group: TxnId, timeout_s: float) -> None:
        """See `Attempts.extend`."""
        key = await self._attached_key()
        await key.extend_group(group, timeout_s)

    async def abandon(self, attempt: TxnId) -> None:
        """Do nothing: the group is decided without this attempt."""

    async def commit(self, decision: Decision, positions: str | None) -> bool:
        """See `Groups.commit`."""
        key = await self._attached_key()
        winners = [
            Winner(
                winner.attempt,
                {segment: SegmentCount(*count) for segment, count in winner.counts.items()},
            )
            for winner in decision.winners
        ]
        committed = await key.commit_group(
            decision.nonce,
            decision.group,
            winners,
            query=decision.query,
            batch=decision.batch,
            positions=positions,
        )
        return committed.done

    async def abort(self) -> bool:
        """See `Groups.abort`."""
        key = await self._attached_key()
        return await key.abort_group()

    async def close(self) -> None:
        """Detach from the key; its epoch stays."""
        if self._key is not None:
            await self._key.close()

    async def _attached_key(self) -> TransactionKey:
        if self._key is None:
            # Attached to, not opened (D1): opening would fence the other processes of this run.
            option = self._option
            self._key = await self._client.attach_transaction_key(option.name, option.epoch)
        return self._key
