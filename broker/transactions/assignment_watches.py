"""WATCH_TC_ASSIGNMENTS: the broker that leads each transaction coordinator, and its changes."""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import ClassVar, cast

from broker.topics.client_connection import ClientConnection
from config.bounds import TXN_ASSIGNMENTS_RETRY_S, TXN_WATCHES
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandWatchTcAssignmentsUpdate,
    TcAssignmentsSnapshot,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from txn.coordinators import Coordinators


class TooManyWatches(PeerError):
    """The connection watches the coordinators too often."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class AssignmentWatches:
    """Serves WATCH_TC_ASSIGNMENTS: the leader of each coordinator, then each change.

    Every update has a whole snapshot: all coordinators that have a leader.  Pulsar's clients rely
    on that.  While some coordinator has no leader, snapshots go out every TXN_ASSIGNMENTS_RETRY_S.
    A client that does not read gets only the newest one, when it reads again.
    """

    def __init__(self, coordinators: Coordinators) -> None:
        self._coordinators = coordinators
        self._watches: dict[ClientConnection, dict[int, None]] = {}
        self._behind: set[ClientConnection] = set()
        """Connections whose newest snapshots wait until they are writable."""
        self._timer: asyncio.Handle | None = None
        self._forget = coordinators.on_change(self._changed)

    def open(self, connection: ClientConnection, watch_id: int) -> None:
        """Send the assignments from now on.  Raises `TooManyWatches`."""
        watches = self._watches.get(connection)
        if watches is None:
            watches = self._watches[connection] = {}
            connection.on_close(partial(self._connection_closed, connection))
        if watch_id not in watches and len(watches) >= TXN_WATCHES:
            raise TooManyWatches(
                f"This connection watches the coordinators {len(watches)} times: close some."
            )
        watches[watch_id] = None
        if self._complete:
            self._send(connection, (watch_id,), self._snapshot(connection.tls))
        else:
            self._send_later()

    def close_one(self, connection: ClientConnection, watch_id: int) -> None:
        """End one watch of a connection; one that is not open is no error."""
        self._watches.get(connection, {}).pop(watch_id, None)

    def close(self) -> None:
        """End all watches."""
        self._forget()
        self._watches.clear()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _complete(self) -> bool:
        return len(self._coordinators.assignments()) >= self._coordinators.parallelism

    def _changed(self) -> None:
        if not self._complete:
            self._send_later()
            return
        if self._timer is not None:
            self._timer.cancel()
        # Changes within one turn of the loop go out in one snapshot.
        self._timer = asyncio.get_running_loop().call_soon(self._send_all)

    def _send_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TXN_ASSIGNMENTS_RETRY_S, self._send_all)

    def _send_all(self) -> None:
        self._timer = None
        snapshots = {
            tls: self._snapshot(tls) for tls in {connection.tls for connection in self._watches}
        }
        for connection, watches in self._watches.items():
            self._send(connection, watches, snapshots[connection.tls])
        if self._watches and not self._complete:
            self._send_later()

    def _send(
        self,
        connection: ClientConnection,
        watch_ids: Iterable[int],
        snapshot: TcAssignmentsSnapshot,
    ) -> None:
        if connection in self._behind:
            return
        if not connection.writable:
            self._behind.add(connection)
            connection.on_writable(partial(self._send_newest, connection))
            return
        for watch_id in watch_ids:
            connection.send(self._update(watch_id, snapshot))

    def _send_newest(self, connection: ClientConnection) -> None:
        """Send the snapshots that were held back while the client did not read."""
        self._behind.discard(connection)
        watches = self._watches.get(connection)
        if watches:
            self._send(connection, watches, self._snapshot(connection.tls))

    def _connection_closed(self, connection: ClientConnection) -> None:
        self._watches.pop(connection, None)
        self._behind.discard(connection)

    def _snapshot(self, tls: bool) -> TcAssignmentsSnapshot:
        """The leaders; for clients that use TLS the plain field has the address with TLS too.

        Pulsar's v5 clients read that field alone, and speak TLS there.
        """
        snapshot = TcAssignmentsSnapshot(parallelism=self._coordinators.parallelism)
        for number, leader in sorted(self._coordinators.assignments().items()):
            plain, over_tls = leader.broker_url, leader.broker_url_tls
            snapshot.assignments.add(
                tc_id=number,
                # None leaves the field out.
                broker_service_url=((over_tls or plain) if tls else plain) or None,
                broker_service_url_tls=over_tls,
            )
        return snapshot

    def _update(self, watch_id: int, snapshot: TcAssignmentsSnapshot) -> BaseCommand:
        return watch_update(CommandWatchTcAssignmentsUpdate(watch_id=watch_id, snapshot=snapshot))


def watch_update(update: CommandWatchTcAssignmentsUpdate) -> BaseCommand:
    """Wrap an update into its command, WATCH_TC_ASSIGNMENTS_UPDATE."""
    return BaseCommand(
        type=BaseCommand.WATCH_TC_ASSIGNMENTS_UPDATE, watch_tc_assignments_update=update
    )


def watch_error(watch_id: int, error: MagnetarError) -> BaseCommand:
    """The update that answers a watch with an error instead of a snapshot."""
    return watch_update(
        CommandWatchTcAssignmentsUpdate(
            watch_id=watch_id, error=cast("WireError", int(error.code)), message=str(error)
        )
    )
