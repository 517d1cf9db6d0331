"""The transactions in which one connection may send and acknowledge: those that its role began.

Ids of transactions are small numbers, so that any client can name those of others.  Where
authorization is on, SEND and ACK are checked here before they reach the segment.
"""

import asyncio
import enum
from collections.abc import Callable
from typing import Protocol

from config.bounds import OWN_TRANSACTIONS
from magnetar.background_tasks import BackgroundTasks, OwnerStopped
from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.server_error import InternalError, MagnetarError
from magnetar.protocol.txn_id import TxnId
from txn.errors import TransactionEnded, TransactionNotFound
from txn.header import not_found_text
from txn.store import StoredHeader

Then = Callable[[MagnetarError | None], None]
"""Called once, from the event loop: with the error of a refusal, or with None."""


class OpenTransactions(Protocol):
    """The open transactions of the coordinators that this process leads."""

    def find_open(self, txn: TxnId) -> StoredHeader | None:
        """An open transaction; None if there is none, or another broker leads its coordinator."""
        ...


class Headers(Protocol):
    """The stored headers of transactions."""

    async def read_header(self, txn: TxnId, *, fresh: bool = False) -> StoredHeader | None:
        """Read a header; None if there is none."""
        ...


class _Ownership(enum.Enum):
    """What the header of a transaction says about its owner."""

    OWN = "the role began it"
    FOREIGN = "another role began it, or none"
    NOT_FOUND = "there is no such transaction"


class OwnTransactions:
    """The transactions that the role of a connection began.

    A header is read once for each transaction, unless this process leads its coordinator.  The
    owner of a transaction never changes, so one that is known stays the role's own, also after its
    end.  The newest OWN_TRANSACTIONS are remembered.

    A transaction of another role and one that does not exist get the same answer, after the same
    reads.  `report` is called with a command and the transaction of another role that it names, and
    returns whether the command is served all the same, as in a dry run.
    """

    def __init__(
        self,
        role: str | None,
        open_here: OpenTransactions,
        headers: Headers,
        tasks: BackgroundTasks,
        report: Callable[[BaseCommand.Type, TxnId], bool],
    ) -> None:
        self._role = role
        self._open_here = open_here
        self._headers = headers
        self._tasks = tasks
        self._report = report
        self.known: dict[TxnId, None] = {}
        """The remembered ones, oldest first."""
        self._reading: dict[TxnId, asyncio.Task[_Ownership]] = {}

    def is_own(self, txn: TxnId) -> bool:
        """Whether a transaction is known, without a read, to be the role's own."""
        if txn in self.known:
            return True
        stored = self._open_here.find_open(txn)
        if not self._is_of_role(stored):
            return False
        self._remember(txn)
        return True

    def check_send(self, txn: TxnId, then: Then) -> None:
        """Read who began a transaction, then call `then` with the refusal of a SEND, or None."""
        try:
            reading = self._read_once(txn)
        except OwnerStopped as stopped:
            asyncio.get_running_loop().call_soon(then, stopped)
            return
        # Clients repeat a SEND endlessly after any other code than that of `TransactionEnded`.
        reading.add_done_callback(
            lambda done: then(self._refusal(BaseCommand.SEND, txn, done, TransactionEnded))
        )

    async def refusal_of_ack(self, txn: TxnId) -> MagnetarError | None:
        """Read who began a transaction; return the refusal of an ACK in it, or None."""
        try:
            reading = self._read_once(txn)
        except OwnerStopped as stopped:
            return stopped
        await asyncio.wait((reading,))
        return self._refusal(BaseCommand.ACK, txn, reading, TransactionNotFound)

    def _read_once(self, txn: TxnId) -> asyncio.Task[_Ownership]:
        """Start to read a header, or return the read that is in progress."""
        reading = self._reading.get(txn)
        if reading is None:
            reading = self._reading[txn] = self._tasks.start(self._read(txn))
            reading.add_done_callback(lambda _: self._reading.pop(txn, None))
        return reading

    async def _read(self, txn: TxnId) -> _Ownership:
        stored = await self._headers.read_header(txn)
        if not self._is_of_role(stored):
            # The first read may be stale, from before the transaction began.  It is repeated even
            # if it found one of another role, so that the time of the answer does not tell which.
            stored = await self._headers.read_header(txn, fresh=True)
        if stored is None:
            return _Ownership.NOT_FOUND
        return _Ownership.OWN if self._is_of_role(stored) else _Ownership.FOREIGN

    def _refusal(
        self,
        operation: BaseCommand.Type,
        txn: TxnId,
        reading: asyncio.Task[_Ownership],
        refused: Callable[[str], MagnetarError],
    ) -> MagnetarError | None:
        if reading.cancelled():
            return OwnerStopped("This broker stops: connect again.")
        error = reading.exception()
        if error is not None:
            if isinstance(error, MagnetarError):
                return error
            return InternalError("The broker failed: its log has the cause.")
        ownership = reading.result()
        passes = ownership is _Ownership.OWN
        if ownership is _Ownership.FOREIGN:
            passes = self._report(operation, txn)
        if not passes:
            return refused(not_found_text(txn))
        self._remember(txn)
        return None

    def _is_of_role(self, stored: StoredHeader | None) -> bool:
        # A transaction without an owner was begun before authentication was on: only superusers may
        # use it.
        return stored is not None and stored.header.owner == self._role is not None

    def _remember(self, txn: TxnId) -> None:
        self.known[txn] = None
        if len(self.known) > OWN_TRANSACTIONS:
            del self.known[next(iter(self.known))]
