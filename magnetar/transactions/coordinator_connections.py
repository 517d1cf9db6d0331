"""The connections to the transaction coordinators: who they are, and whose turn it is.

Rules:

- Each coordinator is attached to (TC_CLIENT_CONNECT_REQUEST) when it is first needed, and again
  when its connection is lost or another broker leads it.
- New transactions go to the coordinators in turn, from coordinator 1 on.
"""

from itertools import count
from typing import Final

from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed, CoordinatorNotFound
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.transactions.coordinator_watch import CoordinatorWatch
from magnetar.transactions.standing_attachment import StandingAttachment
from magnetar.wire.attachment import AttachmentState
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["Coordinator", "CoordinatorConnections"]

_FIRST: Final = 1
"""The coordinator of the first transaction."""


class Coordinator(StandingAttachment):
    """The connection to one coordinator."""

    def __init__(self, context: ClientContext, number: int, watch: CoordinatorWatch) -> None:
        super().__init__(context)
        self.number: Final = number
        self.url: str | None = None
        """The broker that it is looked for at."""
        self._watch = watch
        # No command names it: by it the connection tells of its loss.
        self._session_id: Final = context.ids.session_id()

    def describe(self) -> str:
        """What it is."""
        return f"Transaction coordinator {self.number}"

    async def find(self) -> Connection:
        """The broker that leads it."""
        await self._watch.told()
        self.url = self._watch.leaders.get(self.number)
        if self.url is None:
            raise CoordinatorNotFound(
                f"Transaction coordinator {self.number} has no leader now; look whether the "
                "brokers are up."
            )
        return await self.context.pool.at(self.url)

    async def attach(self, connection: Connection) -> None:
        """Say that this connection uses it."""
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
        """Leave them; bounded in time."""
        self._closed = True
        for coordinator in list(self._coordinators.values()):
            await coordinator.close()
        await self._watch.close()

    async def number_of_key(self, key: str) -> int:
        """The coordinator that serves a transaction key."""
        await self.watching()
        return coordinator_of_key(key, max(1, self._watch.parallelism))

    def of(self, number: int) -> Coordinator:
        """One of them; anew after it has failed for good."""
        known = self._coordinators.get(number)
        if known is None or known.state is AttachmentState.FAILED:
            if self._closed:
                raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")
            known = self._coordinators[number] = Coordinator(self._context, number, self._watch)
        return known

    async def watching(self) -> None:
        """Until it is known who leads them.  Raises why it will not be."""
        if self._closed:
            raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")
        if self._watch.state is AttachmentState.FAILED:
            self._watch = CoordinatorWatch(self._context, self._leaders_changed)
        await self._watch.told()

    async def next_number(self) -> int:
        """Whose turn it is to begin a transaction."""
        await self.watching()
        numbers = list(self._watch.leaders)
        if not numbers:
            raise CoordinatorNotFound(
                "No transaction coordinator has a leader now; look whether the brokers are up."
            )
        return numbers[next(self._turns) % len(numbers)]

    def _leaders_changed(self) -> None:
        for coordinator in self._coordinators.values():
            url = self._watch.leaders.get(coordinator.number)
            if url is not None and coordinator.url is not None and url != coordinator.url:
                coordinator.again(CoordinatorNotFound(f"{coordinator.describe()} has moved."))
