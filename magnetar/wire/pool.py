"""`ConnectionPool`: the connections of one client."""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from ssl import SSLContext

from magnetar.bounds import KNOWN_BROKERS, LOOKUP_REDIRECTS
from magnetar.credentials.exposure import Exposure
from magnetar.errors import (
    AlreadyClosed,
    AuthenticationFailed,
    BrokerFailed,
    ClientError,
    ConnectionLost,
    ServiceNotReady,
    TokenNotRenewed,
)
from magnetar.identity import Identities
from magnetar.protocol.pulsar_pb2 import CommandLookupTopicResponse
from magnetar.settings import ClientSettings
from magnetar.wire.authentication import Authentication, authentication_of
from magnetar.wire.connection import Connection, connect_to
from magnetar.wire.lookup import Owner, lookup_command, owner_in
from magnetar.wire.service_url import BrokerAddress, HostPort, ServiceUrl, parse_service_url
from magnetar.wire.tls import tls_context

__all__ = ["ConnectionPool"]

_log = logging.getLogger(__name__)


class ConnectionPool:
    """The connections of one client, one to each broker address, shared by all its parts.

    Tasks that need a connection while it is made wait for the same one; cancelling one of them does
    not stop it.  A lost connection is dropped, and made again when it is needed.
    """

    def __init__(
        self,
        service_url: str,
        settings: ClientSettings,
        ids: Identities,
        rng: random.Random,
        authentication: Authentication | None = None,
        renewed_tls: Callable[[], SSLContext] | None = None,
        max_frame_bytes: int | None = None,
    ) -> None:
        """`authentication` is that of the settings unless given.

        `renewed_tls` is called for each connection; by default the files are read once.
        `max_frame_bytes` is as for `ConnectionCore`.  Raises
        `InvalidArgument` for a URL or for TLS files that cannot be used.
        """
        self._service: ServiceUrl = parse_service_url(service_url)
        self._settings = settings
        self._ids = ids
        self._authentication = authentication or authentication_of(settings)
        self._renewed_tls = renewed_tls
        self._max_frame_bytes = max_frame_bytes
        self._tls: SSLContext | None = None
        if self._service.tls:
            self._context()
        self._turn = rng.randrange(len(self._service.hosts))
        self._proxied = False
        self._authenticated = False
        self._refusal_logged = False
        self._exposure = Exposure()
        self._connections: dict[BrokerAddress, Connection] = {}
        self._making: dict[BrokerAddress, asyncio.Task[Connection]] = {}
        self._tls_urls: dict[str, str] = {}
        self._closed = False

    @property
    def tls(self) -> bool:
        """Whether brokers are reached by TLS."""
        return self._service.tls

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The live connections."""
        return tuple(self._connections.values())

    def tls_url_of(self, url: str) -> str | None:
        """The TLS URL of the broker with this plain URL, if a lookup has returned both.

        5.0.0-M1 sends only the plain URL of the brokers that lead topics.
        """
        return self._tls_urls.get(url)

    async def any(self) -> Connection:
        """A connection to a host of the service URL: the same one until it fails.

        Raises the last error if none can be reached, and at once an error that is not retriable.
        """
        return await self._by_service_url(None)

    async def at(self, url: str) -> Connection:
        """A connection to the broker of this URL, which came from a broker."""
        # If lookups say that brokers are behind the service URL (a proxy), all of them are.
        return await self._to_owner(Owner(url, self._proxied))

    async def of_topic(self, topic: str) -> Connection:
        """A connection to the broker that serves a topic now, of any domain.

        It follows up to LOOKUP_REDIRECTS redirects, and does not retry.
        """
        turn = self._turn
        try:
            owner = await self._look_up(topic)
        except ServiceNotReady:
            self._next_host(turn)
            raise
        self._proxied = owner.proxied
        return await self._to_owner(owner)

    async def close(self) -> None:
        """Close all connections; bounded in time."""
        self._closed = True
        making = tuple(self._making.values())
        for task in making:
            task.cancel()
        if making:
            await asyncio.wait(making)
        await asyncio.gather(*(each.close() for each in self.connections))

    async def _look_up(self, topic: str) -> Owner:
        connection = await self.any()
        authoritative = False
        for _ in range(LOOKUP_REDIRECTS + 1):
            question = lookup_command(
                topic, authoritative=authoritative, listener_name=self._settings.listener_name
            )
            answer = (await connection.request(question)).lookup_response
            self._learn_of(answer.broker_service_url, answer.broker_service_url_tls)
            owner = owner_in(answer, topic, tls=self.tls)
            if answer.response == CommandLookupTopicResponse.Connect:
                return owner
            authoritative = answer.authoritative
            connection = await self._to_owner(owner)
        raise BrokerFailed(
            f"The brokers redirected the lookup of {topic!r} {LOOKUP_REDIRECTS} times; "
            "check whether they agree on its owner."
        )

    def _learn_of(self, url: str, tls_url: str) -> None:
        """Remember the two URLs of one broker in a lookup's answer; either may be empty."""
        if not url or not tls_url:
            return
        self._tls_urls.pop(url, None)
        self._tls_urls[url] = tls_url
        if len(self._tls_urls) > KNOWN_BROKERS:
            del self._tls_urls[next(iter(self._tls_urls))]

    async def _to_owner(self, owner: Owner) -> Connection:
        """A connection to the broker in a lookup's answer, through the proxy if it says so."""
        url = parse_service_url(owner.url)
        logical = url.hosts[0]
        tls = url.tls or self.tls
        if owner.proxied:
            return await self._by_service_url(logical)
        return await self._to(BrokerAddress(logical, logical, tls))

    async def _by_service_url(self, broker: HostPort | None) -> Connection:
        """A connection to `broker` through any host of the service URL, or to any such host."""
        hosts = self._service.hosts
        failure: Exception | None = None
        for _ in hosts:
            turn = self._turn
            host = hosts[turn]
            try:
                return await self._to(BrokerAddress(broker or host, host, self.tls))
            except (ConnectionLost, ServiceNotReady) as error:
                failure = error
                self._next_host(turn)
        assert failure is not None, "a service URL has a host"
        raise failure

    def _next_host(self, failed: int) -> None:
        """Go on to the next host, unless another task has done so meanwhile."""
        if self._turn == failed:
            self._turn = (failed + 1) % len(self._service.hosts)

    async def _to(self, address: BrokerAddress) -> Connection:
        if self._closed:
            raise _closed()
        known = self._connections.get(address)
        if known is not None:
            return known
        task = self._making.get(address)
        if task is None:
            task = self._making[address] = asyncio.create_task(self._make(address))
            task.add_done_callback(partial(self._made, address))
        await asyncio.wait((task,))
        if task.cancelled():
            raise _closed()
        return task.result()

    async def _make(self, address: BrokerAddress) -> Connection:
        tls = self._context() if address.tls else None
        if self._authentication.is_secret and not address.tls:
            self._exposure.warn(address.physical.host, address, self._authentication.method)
        try:
            connection = await connect_to(
                address,
                self._settings,
                self._ids,
                self._authentication,
                tls,
                self._max_frame_bytes,
            )
        except AuthenticationFailed as error:
            raise self._not_authenticated(error, address) from error
        self._authenticated = True
        self._refusal_logged = False
        if not connection.is_lost:
            connection.when_lost = self._lost
            self._connections[address] = connection
            self._drop_surplus()
        return connection

    def _drop_surplus(self) -> None:
        """Close the oldest connection above the bound: a broker may name any number of others."""
        if len(self._connections) > KNOWN_BROKERS:
            oldest = next(iter(self._connections.values()))
            oldest.abort(
                ConnectionLost(
                    f"A client keeps connections to {KNOWN_BROKERS} brokers, and opened another "
                    "one: it connects anew where it has to."
                )
            )

    def _context(self) -> SSLContext:
        """The TLS of a new connection.  Raises `InvalidArgument`."""
        if self._renewed_tls is not None:
            return self._renewed_tls()
        if self._tls is None:
            self._tls = tls_context(self._settings)
        return self._tls

    def _not_authenticated(
        self, error: AuthenticationFailed, address: BrokerAddress
    ) -> AuthenticationFailed:
        """The error to raise: a retriable one if other credentials may come."""
        self._authentication.refused()
        if not (self._authenticated and self._authentication.renewed):
            return error
        # Credentials of this client were good before, so later ones may be good again.
        if not self._refusal_logged:
            self._refusal_logged = True
            _log.warning("credentials_not_renewed broker=%s reason=%r", address, str(error))
        return TokenNotRenewed(str(error))

    def _made(self, address: BrokerAddress, task: asyncio.Task[Connection]) -> None:
        if self._making.get(address) is task:
            del self._making[address]
        if not task.cancelled():
            task.exception()  # Retrieved, so that asyncio does not report it.

    def _lost(self, connection: Connection) -> None:
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]


def _closed() -> ClientError:
    return AlreadyClosed("The client is closed; connect anew with magnetar.connect.")
