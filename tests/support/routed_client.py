"""Connections to the brokers that serve topics and coordinators, each found by a lookup.

As a client's: one connection to each broker, and what was looked up counts until they are closed.
Nothing is tried again: a user that loses a connection closes all of them, and starts anew.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, Self
from urllib.parse import urlsplit

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.broker_process import BrokerProcess
from tests.support.child_process import HOST
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import TIMEOUT_S

MOST_REDIRECTS: Final = 5
COORDINATORS: Final = "persistent://pulsar/system/transaction_coordinator_assign"


class RoutedClient:
    """See the module's docstring.  Answers are awaited for `timeout_s`."""

    def __init__(self, brokers: Sequence[BrokerProcess], timeout_s: float = TIMEOUT_S) -> None:
        self._brokers = brokers
        self._timeout_s = timeout_s
        self._connections: dict[int, RawClient] = {}
        self._ports: dict[str, int] = {}
        self._connecting = asyncio.Lock()

    async def to_owner(self, topic: str) -> RawClient:
        """The connection to the broker that serves a topic.

        Raises `BrokerError`, `OSError`, `TimeoutError`.
        """
        return await self._to(await self.port_of(topic))

    async def to_coordinator(self, number: int) -> RawClient:
        """The connection to the broker that leads a coordinator.  Raises as `to_owner`."""
        return await self.to_owner(f"{COORDINATORS}-partition-{number}")

    async def port_of(self, topic: str) -> int:
        """The port of the broker that serves a topic.  Raises as `to_owner`."""
        if topic not in self._ports:
            self._ports[topic] = await self._look_up(topic)
        return self._ports[topic]

    async def _look_up(self, topic: str) -> int:
        running = [each for each in self._brokers if each.running]
        if not running:
            raise ConnectionError("no broker runs")
        port, authoritative = running[0].port, False
        for _ in range(MOST_REDIRECTS):
            client = await self._to(port)
            answer = await client.lookup(topic, authoritative=authoritative)
            if answer.response == pb.CommandLookupTopicResponse.Failed:
                raise BrokerError(answer.error, answer.message)
            named = urlsplit(answer.broker_service_url).port
            assert named is not None, answer
            port, authoritative = named, answer.authoritative
            if answer.response == pb.CommandLookupTopicResponse.Connect:
                return port
        raise ConnectionError(f"{topic} was redirected {MOST_REDIRECTS} times")

    async def _to(self, port: int) -> RawClient:
        async with self._connecting:
            found = self._connections.get(port)
            if found is None:
                found = await RawClient.open(HOST, port, timeout_s=self._timeout_s)
                self._connections[port] = found
        return found

    def forget(self) -> None:
        """Look everything up again from now on; connections stay open."""
        self._ports.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections.  What was looked up is forgotten."""
        connections = list(self._connections.values())
        self._connections.clear()
        self.forget()
        for each in connections:
            await each.close()
