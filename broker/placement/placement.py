"""The interface to the placement of topics on brokers, and its form for a single broker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar, Protocol, TypeVar

from broker.placement.dialing import Dialer
from broker.placement.typed_request import Request
from config.bounds import PEER_TIMEOUT_S
from magnetar.background_tasks import EndsForGood
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.server_error import PeerError, ServerError
from storage.metadata.store import Session

A = TypeVar("A")
H = TypeVar("H")
OwnerListener = Callable[[TopicName], None]
"""A function that is called with a name that has another owner now, or none."""


class OwnedElsewhere(PeerError):
    """Another broker owns the topic: look it up again.  `owner_id` is that broker, if known."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY

    def __init__(self, message: str, owner_id: str = "") -> None:
        super().__init__(message)
        self.owner_id = owner_id


class PlacementNotReady(PeerError):
    """This broker acquires no topics now: look the topic up again, another broker may own it."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY
    http_status: ClassVar[HTTPStatus] = HTTPStatus.SERVICE_UNAVAILABLE


class SupersededProcess(PlacementNotReady, EndsForGood):
    """Another process has this broker's id now; this process never gets a session again."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The addresses at which clients reach a broker.

    An address without TLS is empty if the broker has no such port, and one with TLS is None.
    """

    url: str
    url_tls: str | None = None
    web_url: str = ""
    broker_id: str = ""
    web_url_tls: str | None = None

    def url_for(self, tls: bool) -> str:
        """The address for a client that uses TLS, or none; the other one if there is no such."""
        over_tls = self.url_tls or ""
        return (over_tls or self.url) if tls else (self.url or over_tls)

    def web_url_for(self, tls: bool) -> str:
        """The REST address for a client that uses TLS, or none; the other one likewise."""
        return (
            (self.web_url_tls or self.web_url) if tls else (self.web_url or self.web_url_tls or "")
        )


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The answer to a lookup.

    With `connect` the client connects to `address`; else it looks up again there, and that lookup
    is authoritative.  `here`: the address is this broker's.
    """

    address: BrokerAddress
    connect: bool
    here: bool


@dataclass(slots=True)
class PlacementCounters:
    """Counts since this process started."""

    acquired: int = 0
    taken_over: int = 0
    """The part of `acquired` whose former owner was gone, and had not released it."""
    released: int = 0
    lost: int = 0
    redirects: int = 0
    sessions_lost: int = 0
    moves: int = 0
    """Topics that this process, as leader, has had moved to other brokers."""


class PeerConnection(Protocol):
    """The connection to another broker, shared by all that ask it."""

    async def ask(self, request: Request[H, A], *, timeout_s: float | None) -> A:
        """See `Placement.ask`."""
        ...

    def on_event(self, kind: str, listener: Callable[[object], None] | None) -> None:
        """Call `listener` with the JSON of each event of a kind, instead of an earlier listener.

        An error of the listener closes the connection and is raised by `wait_lost`.
        """
        ...

    async def wait_lost(self) -> None:
        """Wait until the connection is lost.  Raises `PeerFailed`, or the error of a listener."""
        ...

    async def close(self) -> None:
        """Close it for all."""
        ...


class Placement(ABC):
    """Interface: which broker owns a name, its addresses, and how to own one here.

    Every lookup, layout, assignment and redirect takes its addresses from here.  A topic or segment
    is acquired before it is loaded and released after it is unloaded; its controller acquires a
    scalable topic by its `topic://` name.

    Placement only decides where clients go.  It does not prevent two owners: the fencing of ledgers
    and conditional writes see to it that at most one of them acknowledges.
    """

    shared: ClassVar[bool]
    """Whether there may be other brokers."""

    def __init__(self, advertised_host: str) -> None:
        self._host = f"[{advertised_host}]" if ":" in advertised_host else advertised_host
        self._port = 0
        self._http_port = 0
        self._port_tls: int | None = None
        self._http_port_tls: int | None = None
        self._plaintext = True
        self.dialer = Dialer()
        """Connects to the binary protocol of other brokers."""
        self.counters = PlacementCounters()

    def listening(self, *, port: int | None = None, http_port: int | None = None) -> None:
        """Set the ports that are really used, once the sockets are open."""
        self._port = self._port if port is None else port
        self._http_port = self._http_port if http_port is None else http_port

    def listening_tls(
        self, *, port: int | None = None, http_port: int | None = None, only: bool = False
    ) -> None:
        """Set the ports with TLS, once the sockets are open; `only`: there are no plain ones."""
        self._port_tls = self._port_tls if port is None else port
        self._http_port_tls = self._http_port_tls if http_port is None else http_port
        self._plaintext = self._plaintext and not only

    @property
    def broker_id(self) -> str:
        """`host:port` of the REST address, the plain one if there is one: Pulsar's broker id."""
        return f"{self._host}:{self._http_port if self._plaintext else self._http_port_tls}"

    @property
    def broker_url(self) -> str:
        """`pulsar://...` of this broker; empty without a plain port."""
        return f"pulsar://{self._host}:{self._port}" if self._plaintext else ""

    @property
    def web_url(self) -> str:
        """`http://...` of this broker; empty without a plain port."""
        return f"http://{self._host}:{self._http_port}" if self._plaintext else ""

    @property
    def me(self) -> BrokerAddress:
        """The address of this broker."""
        port, http_port = self._port_tls, self._http_port_tls
        return BrokerAddress(
            self.broker_url,
            None if port is None else f"pulsar+ssl://{self._host}:{port}",
            self.web_url,
            self.broker_id,
            None if http_port is None else f"https://{self._host}:{http_port}",
        )

    @property
    @abstractmethod
    def brokers(self) -> Mapping[str, BrokerAddress]:
        """The addresses of the live brokers, by broker id."""

    @property
    @abstractmethod
    def candidates(self) -> Sequence[str]:
        """Ids of the live brokers that acquire names without an owner, sorted."""

    @property
    @abstractmethod
    def leader(self) -> BrokerAddress | None:
        """The broker that balances load, if there is one now."""

    @property
    @abstractmethod
    def draining(self) -> bool:
        """Whether this broker gives up all it owns and acquires nothing."""

    @property
    @abstractmethod
    def owned(self) -> Sequence[str]:
        """Full names that this process owns; empty for a single broker, which keeps no record."""

    @abstractmethod
    def owners(self) -> Mapping[str, str]:
        """The broker ids of all known owners, by full name; empty for a single broker."""

    @property
    @abstractmethod
    def cpu_percent(self) -> float:
        """The processor use that this broker last reported, in percent of one core; 0 if none."""

    @abstractmethod
    def load_report(self) -> Mapping[str, object]:
        """This broker's record as other brokers see it, in Pulsar's form."""

    @abstractmethod
    def known_owner(self, name: TopicName) -> BrokerAddress | None:
        """The live broker that owns a name, as far as is known; None without an owner."""

    @abstractmethod
    def owner_of(self, name: TopicName) -> BrokerAddress:
        """The owner of a name, as far as is known, else the broker that would be chosen now."""

    def controller_of(self, name: TopicName) -> BrokerAddress:
        """The broker whose controller assigns a scalable topic's segments: owner of its name."""
        return self.owner_of(name.in_domain(TopicDomain.TOPIC))

    @abstractmethod
    def owns(self, name: TopicName) -> bool:
        """Whether this process owns a name, and its session is alive."""

    @abstractmethod
    def place(self, name: TopicName, *, authoritative: bool) -> LookupResult:
        """Answer a lookup.  `authoritative`: another broker has chosen this one.

        It acquires nothing: the broker that is then asked to serve the topic does.  Raises
        `PlacementNotReady`.
        """

    @abstractmethod
    async def acquire(self, name: TopicName) -> None:
        """Own a name; called before a topic is loaded.  A name that is owned already is no error.

        Raises `OwnedElsewhere`, `PlacementNotReady`, `MetadataError`.
        """

    @abstractmethod
    async def release(self, name: TopicName) -> None:
        """Give up a name, after it is unloaded.  Never raises; a name not owned is no error."""

    @abstractmethod
    def on_change(self, listener: OwnerListener) -> Callable[[], None]:
        """Call `listener` when a name has another owner, or none; returns its removal.

        It is also called when this process lost the name: with its session, or to a later process.
        """

    @abstractmethod
    def on_brokers(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when brokers come, go, or begin to drain; returns its removal."""

    @abstractmethod
    async def live_session(self) -> Session:
        """Wait for a live session of this broker; its ephemeral records belong to it.

        Raises `SupersededProcess` when there never will be one, and `PlacementNotReady` for a
        single broker.
        """

    @abstractmethod
    async def connect(self, address: BrokerAddress) -> PeerConnection:
        """Return the connection to another broker, opened if need be.  Raises `PeerFailed`."""

    @abstractmethod
    async def ask(
        self, address: BrokerAddress, request: Request[H, A], *, timeout_s: float = PEER_TIMEOUT_S
    ) -> A:
        """Have another broker carry out a typed request, and return its answer.

        Raises `PeerFailed`, `FrameTooLarge`, `PositionOfOneBroker`, and `MalformedRequest` for an
        answer of another type.
        """


class OneBroker(Placement):
    """The placement of a single broker: it owns everything, writes nothing, watches nothing."""

    shared: ClassVar[bool] = False

    @property
    def brokers(self) -> Mapping[str, BrokerAddress]:
        """See `Placement`."""
        return {self.broker_id: self.me}

    @property
    def candidates(self) -> Sequence[str]:
        """See `Placement`."""
        return (self.broker_id,)

    @property
    def leader(self) -> BrokerAddress | None:
        """See `Placement`."""
        return self.me

    @property
    def draining(self) -> bool:
        """See `Placement`.  A single broker has no other to give its topics to."""
        return False

    @property
    def owned(self) -> Sequence[str]:
        """See `Placement`."""
        return ()

    def owners(self) -> Mapping[str, str]:
        """See `Placement`."""
        return {}

    @property
    def cpu_percent(self) -> float:
        """See `Placement`."""
        return 0.0

    def load_report(self) -> Mapping[str, object]:
        """See `Placement`.  It has no load, as there is no other broker to report it to."""
        me = self.me
        return {
            "webServiceUrl": me.web_url or None,
            "webServiceUrlTls": me.web_url_tls,
            "pulsarServiceUrl": me.url or None,
            "pulsarServiceUrlTls": me.url_tls,
        }

    def known_owner(self, name: TopicName) -> BrokerAddress | None:
        """See `Placement`."""
        return self.me

    def owner_of(self, name: TopicName) -> BrokerAddress:
        """See `Placement`."""
        return self.me

    def controller_of(self, name: TopicName) -> BrokerAddress:
        """See `Placement`."""
        return self.me

    def owns(self, name: TopicName) -> bool:
        """See `Placement`."""
        return True

    def place(self, name: TopicName, *, authoritative: bool) -> LookupResult:
        """See `Placement`."""
        return LookupResult(self.me, connect=True, here=True)

    async def acquire(self, name: TopicName) -> None:
        """See `Placement`."""

    async def release(self, name: TopicName) -> None:
        """See `Placement`."""

    def on_change(self, listener: OwnerListener) -> Callable[[], None]:
        """See `Placement`.  Nothing ever changes."""
        return _nothing

    def on_brokers(self, listener: Callable[[], None]) -> Callable[[], None]:
        """See `Placement`.  Nothing ever changes."""
        return _nothing

    async def live_session(self) -> Session:
        """See `Placement`.  With a single broker each part opens its own session."""
        raise PlacementNotReady("A single broker shares no session: open one.")

    async def connect(self, address: BrokerAddress) -> PeerConnection:
        """See `Placement`.  There is no other broker to connect to."""
        raise _no_others(address)

    async def ask(
        self, address: BrokerAddress, request: Request[H, A], *, timeout_s: float = PEER_TIMEOUT_S
    ) -> A:
        """See `Placement`.  There is no other broker to call."""
        raise _no_others(address)


def _no_others(address: BrokerAddress) -> PlacementNotReady:
    return PlacementNotReady(f"{address.broker_id} is no broker of this cluster: ask this one.")


def _nothing() -> None:
    """The removal of a listener that is never called."""
