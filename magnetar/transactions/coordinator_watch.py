"""`CoordinatorWatch`, which follows the leaders of the transaction coordinators."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from magnetar.context import ClientContext
from magnetar.errors import ConnectionLost, NotSupported, OperationTimedOut
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.transactions.lazy_attachment import LazyAttachment
from magnetar.wire.connection import Connection, PeerKind
from magnetar.wire.requests import error_in

__all__ = ["CoordinatorWatch", "leaders_in"]


def leaders_in(snapshot: pb.TcAssignmentsSnapshot, *, tls: bool) -> Mapping[int, str]:
    """The URL of the leader of each coordinator that has one, by number, in order of numbers.

    A coordinator without a URL of the wanted kind has no leader now.
    """
    urls = {
        each.tc_id: each.broker_service_url_tls if tls else each.broker_service_url
        for each in snapshot.assignments
    }
    return MappingProxyType({number: url for number, url in sorted(urls.items()) if url})


class CoordinatorWatch(LazyAttachment):
    """Follows which broker leads each transaction coordinator, over reconnects.

    Any broker answers a WATCH_TC_ASSIGNMENTS with all coordinators, and again at each change.  The
    last answer stays valid while the watch is lost.
    """

    def __init__(self, context: ClientContext, changed: Callable[[], None]) -> None:
        """`changed` is called whenever `leaders` may have changed."""
        super().__init__(context)
        self.parallelism = 0
        """The number of coordinators; 0 until it is known."""
        self.leaders: Mapping[int, str] = MappingProxyType({})
        """The URL of the leader of each coordinator that has one."""
        self._on_change = changed
        self._watch_id: Final = context.ids.session_id()
        self._first: asyncio.Future[None] | None = None

    async def wait_first(self) -> None:
        """Wait for the first answer.  Raises the error if the watch fails before."""
        if not self.parallelism:
            await self.ready()

    def describe(self) -> str:
        """The name used in errors."""
        return "The watch of the transaction coordinators"

    async def find(self) -> Connection:
        """A connection to any broker."""
        return await self.context.pool.any()

    async def attach(self, connection: Connection) -> None:
        """Open the watch and wait for its first answer.

        Raises `NotSupported` if the broker does not offer it, and `OperationTimedOut`.
        """
        if not connection.features.supports_tc_metadata_discovery:
            raise NotSupported(
                f"The broker at {connection.address} has no transactions for this client; switch "
                "them on there (Apache Pulsar: transactionCoordinatorEnabled and "
                "transactionCoordinatorScalableTopicsEnabled)."
            )
        timeout_s = self.context.settings.operation_timeout_s
        self._first = first = self.context.loop.create_future()
        try:
            connection.attach(PeerKind.COORDINATORS, self._watch_id, self)
            watch = pb.CommandWatchTcAssignments(watch_id=self._watch_id)
            connection.send(
                pb.BaseCommand(type=pb.BaseCommand.WATCH_TC_ASSIGNMENTS, watch_tc_assignments=watch)
            )
            async with asyncio.timeout(timeout_s):
                await first
        except TimeoutError:
            raise OperationTimedOut(
                f"The broker did not send the transaction coordinators within {timeout_s:g} s; "
                "check whether its coordinators have leaders."
            ) from None
        finally:
            self._first = None

    async def leave(self, connection: Connection) -> None:
        """Close the watch; the broker does not answer that."""
        close = pb.CommandWatchTcAssignmentsClose(watch_id=self._watch_id)
        connection.send(
            pb.BaseCommand(
                type=pb.BaseCommand.WATCH_TC_ASSIGNMENTS_CLOSE, watch_tc_assignments_close=close
            )
        )

    def received(self, frame: Frame) -> None:
        """Take a snapshot, or an error in its place."""
        first, refusal = self._first, error_in(frame.command)
        if refusal is None:
            snapshot = frame.command.watch_tc_assignments_update.snapshot
            self.parallelism = snapshot.parallelism
            self.leaders = leaders_in(snapshot, tls=self.context.pool.tls)
            if first is not None and not first.done():
                first.set_result(None)
            self._on_change()
        elif first is None:
            self.again(refusal)
        elif not first.done():
            first.set_exception(refusal)

    def connection_lost(self, error: ConnectionLost) -> None:
        """Lose the watch, and fail the first answer if it has not come."""
        super().connection_lost(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
