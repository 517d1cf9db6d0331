"""`KeyHolder`: the hold of a process on a transaction key, under an epoch."""

import asyncio
from dataclasses import dataclass
from typing import Final

from magnetar.bounds import MAX_TRANSACTION_KEY_BYTES
from magnetar.context import ClientContext
from magnetar.errors import (
    CoordinatorNotFound,
    InvalidArgument,
    MagnetarError,
    NotAllowed,
    NotSupported,
    TransactionKeyFenced,
)
from magnetar.opening import ClosedAfterwards
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.coordinator_connections import CoordinatorConnections
from magnetar.transactions.groups import GroupRecord, record_of
from magnetar.transactions.lazy_attachment import LazyAttachment
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["NO_EPOCH", "KeyHolder", "LastTransaction", "check_key_name"]

NO_EPOCH: Final = -1
"""The epoch of a holder that knows none; opening then accepts any epoch."""


@dataclass(frozen=True, slots=True)
class LastTransaction:
    """The last transaction that an earlier epoch of a key began."""

    id: TxnId
    committed: bool | None
    """Whether it was committed; None if that is no longer known."""


def check_key_name(name: str) -> None:
    """Raises `InvalidArgument` for a name that no transaction key can have."""
    if not name or "&" in name or len(name.encode()) > MAX_TRANSACTION_KEY_BYTES:
        raise InvalidArgument(
            f"A transaction key cannot be named {name[:64]!r}; give it 1 to "
            f"{MAX_TRANSACTION_KEY_BYTES} bytes without '&'."
        )


class KeyHolder(LazyAttachment, ClosedAfterwards):
    """Holds a transaction key under an epoch, over reconnects, until a newer epoch fences it.

    Opening raises the epoch: when it returns, transactions of older epochs have ended, and their
    holders are fenced for good.  With `attach` the holder uses an epoch that another process has
    opened; several processes can share one.  A fenced holder raises `TransactionKeyFenced` for each
    request.
    """

    def __init__(
        self,
        context: ClientContext,
        connections: CoordinatorConnections,
        name: str,
        epoch: int = NO_EPOCH,
        *,
        attach: bool = False,
    ) -> None:
        """`epoch` is the last known one, or with `attach` the one to use.

        Raises `InvalidArgument` for an invalid name or epoch.
        """
        super().__init__(context)
        check_key_name(name)
        if epoch < (0 if attach else NO_EPOCH):
            raise InvalidArgument(
                f"A transaction key has no epoch {epoch}; give the epoch of the key that was "
                "opened."
            )
        self.name: Final = name
        self.last_transaction: LastTransaction | None = None
        """The last transaction of earlier epochs, as opening found it."""
        self.last_group: GroupRecord | None = None
        """The last batch that a group of any epoch committed, as opening found it."""
        self._epoch = epoch
        self._connections = connections
        self._has_epoch = attach
        self.unanswered: str | None = None
        """The beginner of a transaction of which it is not known whether it has begun.  The next
        one ends it first, as a key has one transaction at a time."""
        self.undoing: Final = asyncio.Lock()
        """Held while that transaction is ended."""
        # By it the broker recognises an OPEN that is sent again because its answer was lost.
        self._opener: Final = f"{context.rng.getrandbits(128):032x}"
        self._session_id: Final = context.ids.session_id()

    @property
    def epoch(self) -> int:
        """The epoch of the key, with which other processes can attach."""
        return self._epoch

    @property
    def is_fenced(self) -> bool:
        """Whether a newer epoch has fenced it."""
        return isinstance(self.error, TransactionKeyFenced)

    def fence(self, cause: MagnetarError) -> TransactionKeyFenced:
        """Fence this holder; returns the error to raise."""
        error = self._fenced(cause)
        self.again(error)
        return error

    async def is_newest(self, connection: Connection) -> bool:
        """Ask the coordinator, on this connection, whether its epoch is the newest."""
        try:
            await self._attach_to_epoch(
                connection, await self._connections.number_of_key(self.name)
            )
        except NotAllowed:
            return False
        return True

    # Openable

    async def open(self, timeout_s: float | None = None) -> None:
        """Open the key, or attach to it.

        Raises `TransactionKeyFenced` if the epoch is not the newest, `NotSupported` where there are
        no keys, `NotAllowed`, and the last error after the operation timeout.
        """
        limit_s = self.context.settings.operation_timeout_s if timeout_s is None else timeout_s
        await super().open(limit_s)

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"Transaction key {self.name!r}"

    async def find(self) -> Connection:
        """A connection to the leader of the key's coordinator."""
        number = await self._connections.number_of_key(self.name)
        return await self._connections.of(number).ready()

    async def attach(self, connection: Connection) -> None:
        """Open the key the first time; afterwards attach to its epoch."""
        if not connection.transaction_keys:
            raise NotSupported(
                f"The broker at {connection.address} has no transaction keys; use a Magnetar "
                "broker, or a transaction without a key."
            )
        connection.attach(PeerKind.COORDINATORS, self._session_id, self)
        number = await self._connections.number_of_key(self.name)
        try:
            if self._has_epoch:
                await self._attach_to_epoch(connection, number)
            else:
                await self._open_epoch(connection, number)
        except CoordinatorNotFound as error:
            self._connections.of(number).again(error)
            raise
        except NotAllowed as error:
            if self._epoch == NO_EPOCH:
                raise
            raise self._fenced(error) from error

    async def _open_epoch(self, connection: Connection, number: int) -> None:
        request = pb.CommandOpenTransactionKey(
            request_id=0, tc_id=number, key=self.name, epoch=self._epoch, opener=self._opener
        )
        answer = await connection.request(
            pb.BaseCommand(type=pb.BaseCommand.OPEN_TRANSACTION_KEY, open_transaction_key=request)
        )
        opened = answer.open_transaction_key_response
        self._epoch, self._has_epoch = opened.epoch, True
        if opened.HasField("last_group"):
            self.last_group = record_of(opened.last_group)
        if opened.HasField("last_txnid_most_bits"):
            self.last_transaction = LastTransaction(
                TxnId(opened.last_txnid_most_bits, opened.last_txnid_least_bits),
                opened.last_committed if opened.HasField("last_committed") else None,
            )

    async def _attach_to_epoch(self, connection: Connection, number: int) -> None:
        request = pb.CommandAttachTransactionKey(
            request_id=0, tc_id=number, key=self.name, epoch=self._epoch
        )
        await connection.request(
            pb.BaseCommand(
                type=pb.BaseCommand.ATTACH_TRANSACTION_KEY, attach_transaction_key=request
            )
        )

    def _fenced(self, cause: MagnetarError) -> TransactionKeyFenced:
        return TransactionKeyFenced(
            f"Transaction key {self.name!r} has another epoch than {self._epoch} ({cause}) "
            "Stop this process, or open the key anew."
        )
