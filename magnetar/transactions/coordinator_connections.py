"""`CoordinatorConnections`: the connections to the leaders of the transaction coordinators."""

from itertools import count
from typing import Final

from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed, CoordinatorNotFound
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.transactions.coordinator_watch import CoordinatorWatch
from magnetar.transactions.lazy_attachment import LazyAttachment
from magnetar.wire.attachment import AttachmentState
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["Coordinator", "CoordinatorConnections"]

_FIRST: Final = 1
"""The coordinator of the first transaction."""


class Coordinator(LazyAttachment):
    """The connection to one coordinator.

    It is attached when it is first needed, and again when its connection is lost or another broker
    leads the coordinator.
    """

    def __init__(self, context: ClientContext, number: int, watch: CoordinatorWatch) -> None:
        super().__init__(context)
        self.number: Final = number
        self.url: str | None = None
        """The URL of the broker at which it was last looked up."""
        self._watch = watch
        # No command carries this id; the connection reports its loss by it.
        self._session_id: Final = context.ids.session_id()

    def describe(self) -> str:
        """The name used in errors."""
        return f"Transaction coordinator {self.number}"

    async def find(self) -> Connection:
        """Connect to the broker that leads the coordinator."""
        await self._watch.wait_first()
        self.url = self._watch.leaders.get(self.number)
        if self.url is None:
            raise CoordinatorNotFound(
                f"Transaction coordinator {self.number} has no leader now; check whether the "
                "brokers are up."
            )
        return await self.context.pool.at(self.url)

    async def attach(self, connection: Connection) -> None:
        """Send TC_CLIENT_CONNECT_REQUEST."""
        connection.attach(PeerKind.COORDINATORS, self._session_id, self)
        request = pb.CommandTcClientConnectRequest(request_id=0, tc_id=self.number, scalable=True)
        await connection.request(
            pb.BaseCommand(
                type=pb.BaseCommand.TC_CLIENT_CONNECT_REQUEST, tc_client_connect_request=request
            )
        )


class CoordinatorConnections:
    """Connections to the leaders of the transaction coordinators. One for each client."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._watch = CoordinatorWatch(context, self._leaders_changed)
        self._coordinators: dict[int, Coordinator] = {}
        self._turns = count(_FIRST)
        self._closed = False

    async def close(self) -> None:
        """Close them; bounded in time."""
        self._closed = True
        for coordinator in list(self._coordinators.values()):
            await coordinator.close()
        await self._watch.close()

    async def number_of_key(self, key: str) -> int:
        """The number of the coordinator that serves a transaction key."""
        await self.wait_leaders()
        return coordinator_of_key(key, max(1, self._watch.parallelism))

    def of(self, number: int) -> Coordinator:
        """The connection to a coordinator; a new one if the last failed for good."""
        known = self._coordinators.get(number)
        if known is None or known.state is AttachmentState.FAILED:
            if self._closed:
                raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")
            known = self._coordinators[number] = Coordinator(self._context, number, self._watch)
        return known

    async def wait_leaders(self) -> None:
        """Wait until the leaders are known.  Raises the error if the watch fails."""
        if self._closed:
            raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")
        if self._watch.state is AttachmentState.FAILED:
            self._watch = CoordinatorWatch(self._context, self._leaders_changed)
        await self._watch.wait_first()

    async def next_number(self) -> int:
        """The number of the coordinator for the next transaction: each in turn, from 1 on."""
        await self.wait_leaders()
        numbers = list(self._watch.leaders)
        if not numbers:
            raise CoordinatorNotFound(
                "No transaction coordinator has a leader now; check whether the brokers are up."
            )
        return numbers[next(self._turns) % len(numbers)]

    def _leaders_changed(self) -> None:
        for coordinator in self._coordinators.values():
            url = self._watch.leaders.get(coordinator.number)
            if url is not None and coordinator.url is not None and url != coordinator.url:
                coordinator.again(CoordinatorNotFound(f"{coordinator.describe()} has moved."))
