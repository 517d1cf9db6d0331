"""A holder of a transaction key, under an epoch: only the newest holder of a name counts.

Rules:

- `open` raises the epoch of a key: what older epochs left open has ended when it returns, and their
  holders are shut out.  An OPEN whose answer is lost is sent again under the same `opener`, which
  the broker knows it by.
- `attach` uses a key under an epoch that somebody else has opened: several processes can.
- The key goes where its coordinator goes; after a reconnect it attaches again before anything else.
- A holder whose epoch is not the newest any more is fenced, for good: everything that is asked
  under the key raises `TransactionKeyFenced`.
- A key has one transaction at a time.  One whose beginning was given up may be open at the broker:
  the next beginning ends it first, as it has another deadline (`unanswered`).
"""

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
from magnetar.transactions.standing_attachment import StandingAttachment
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["NO_EPOCH", "KeyHolder", "LastTransaction", "check_key_name"]

NO_EPOCH: Final = -1
"""Of who knows of none: takes over whatever is there."""


@dataclass(frozen=True, slots=True)
class LastTransaction:
    """The last one that an earlier epoch of a key began."""

    id: TxnId
    committed: bool | None
    """Whether it took effect; None if nobody knows any more."""


def check_key_name(name: str) -> None:
    """Raises `InvalidArgument` for a name that no transaction key can have."""
    if not name or "&" in name or len(name.encode()) > MAX_TRANSACTION_KEY_BYTES:
        raise InvalidArgument(
            f"A transaction key cannot be named {name[:64]!r}; give it 1 to "
            f"{MAX_TRANSACTION_KEY_BYTES} bytes without '&'."
        )


class KeyHolder(StandingAttachment, ClosedAfterwards):
    """Holds a transaction key under an epoch, over reconnects, until a newer epoch fences it."""

    def __init__(
        self,
        context: ClientContext,
        connections: CoordinatorConnections,
        name: str,
        epoch: int = NO_EPOCH,
        *,
        attach: bool = False,
    ) -> None:
        """To be opened, presenting the last epoch known; `attach`: under that epoch, as it is.

        Raises `InvalidArgument` for a name or an epoch that cannot be.
        """
        super().__init__(context)
        check_key_name(name)
        if epoch < (0 if attach else NO_EPOCH):
            raise InvalidArgument(
                f"A transaction key has no epoch {epoch}; give the one that opening it gave."
            )
        self.name: Final = name
        self.last_transaction: LastTransaction | None = None
        """What the opening found: the last transaction of the epochs before, and how it ended."""
        self.last_group: GroupRecord | None = None
        """What the opening found: what the last group that committed, of any epoch, was for."""
        self._epoch = epoch
        self._connections = connections
        self._has_epoch = attach
        self.unanswered: str | None = None
        """The beginner of a transaction of which it is not known whether it has begun."""
        self.undoing: Final = asyncio.Lock()
        """Held while that is ended."""
        self._opener: Final = f"{context.rng.getrandbits(128):032x}"
        self._session_id: Final = context.ids.session_id()

    @property
    def epoch(self) -> int:
        """The one that it has; for others to attach with."""
        return self._epoch

    @property
    def is_fenced(self) -> bool:
        """Whether a newer epoch has shut it out."""
        return isinstance(self.error, TransactionKeyFenced)

    def fence(self, cause: MagnetarError) -> TransactionKeyFenced:
        """It is used no more; the error that says so."""
        error = self._fenced(cause)
        self.again(error)
        return error

    async def is_newest(self, connection: Connection) -> bool:
        """Whether its epoch is the newest one: asked of its coordinator, there."""
        try:
            await self._attach_to_epoch(
                connection, await self._connections.number_of_key(self.name)
            )
        except NotAllowed:
            return False
        return True

    # Openable

    async def open(self, timeout_s: float | None = None) -> None:
        """Until it is open, or attached to.

        Raises `TransactionKeyFenced` if the epoch is not the newest, `NotSupported` where there are
        no keys, `NotAllowed`, and after the operation timeout why it could not be.
        """
        limit_s = self.context.settings.operation_timeout_s if timeout_s is None else timeout_s
        await super().open(limit_s)

    # Attachment

    def describe(self) -> str:
        """What it is."""
        return f"Transaction key {self.name!r}"

    async def find(self) -> Connection:
        """The broker that leads the coordinator of the key."""
        number = await self._connections.number_of_key(self.name)
        return await self._connections.of(number).ready()

    async def attach(self, connection: Connection) -> None:
        """Open it the first time, afterwards attach to the epoch that it has."""
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
        told = answer.open_transaction_key_response
        self._epoch, self._has_epoch = told.epoch, True
        if told.HasField("last_group"):
            self.last_group = record_of(told.last_group)
        if told.HasField("last_txnid_most_bits"):
            self.last_transaction = LastTransaction(
                TxnId(told.last_txnid_most_bits, told.last_txnid_least_bits),
                told.last_committed if told.HasField("last_committed") else None,
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
