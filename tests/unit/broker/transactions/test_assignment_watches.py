"""WATCH_TC_ASSIGNMENTS to clients that do not read."""

import asyncio
from collections.abc import Callable
from typing import cast

from broker.topics.client_connection import ClientConnection
from broker.transactions.assignment_watches import AssignmentWatches
from magnetar.protocol.pulsar_pb2 import BaseCommand
from txn.coordinator_elections import Leader
from txn.coordinators import Coordinators


class Leaders:
    """Coordinators whose leaders a test sets."""

    def __init__(self) -> None:
        self.parallelism = 1
        self.leaders: dict[int, Leader] = {}
        self._changed: Callable[[], None]

    def assignments(self) -> dict[int, Leader]:
        return self.leaders

    def on_change(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._changed = changed
        return lambda: None

    async def lead(self, url: str) -> None:
        self.leaders = {0: Leader("b", url, "")}
        self._changed()
        await asyncio.sleep(0)


class Client:
    """A connection that keeps what it was sent."""

    def __init__(self) -> None:
        self.tls = False
        self.writable = True
        self.sent: list[BaseCommand] = []
        self.waiting: list[Callable[[], None]] = []
        self.closed: list[Callable[[], None]] = []

    def send(self, command: BaseCommand) -> None:
        self.sent.append(command)

    def on_writable(self, callback: Callable[[], None]) -> None:
        self.waiting.append(callback)

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.closed.append(callback)
        return lambda: None

    def read(self) -> list[tuple[int, str]]:
        """Be writable again; returns the watch ids and leaders that came."""
        self.writable = True
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()
        updates = [command.watch_tc_assignments_update for command in self.sent]
        self.sent = []
        return [(u.watch_id, u.snapshot.assignments[0].broker_service_url) for u in updates]


async def test_a_client_that_does_not_read_gets_the_newest_assignments_alone() -> None:
    leaders, client = Leaders(), Client()
    watches = AssignmentWatches(cast("Coordinators", leaders))
    await leaders.lead("pulsar://a")
    connection = cast("ClientConnection", client)
    watches.open(connection, 1)
    assert client.read() == [(1, "pulsar://a")]
    client.writable = False
    watches.open(connection, 2)
    for url in ("pulsar://b", "pulsar://c"):
        await leaders.lead(url)
    assert client.sent == []
    assert client.read() == [(1, "pulsar://c"), (2, "pulsar://c")]
    await leaders.lead("pulsar://d")
    assert client.read() == [(1, "pulsar://d"), (2, "pulsar://d")]


async def test_a_client_that_leaves_without_reading_is_forgotten() -> None:
    leaders, client = Leaders(), Client()
    watches = AssignmentWatches(cast("Coordinators", leaders))
    await leaders.lead("pulsar://a")
    client.writable = False
    watches.open(cast("ClientConnection", client), 1)
    for callback in client.closed:
        callback()
    assert client.read() == []
