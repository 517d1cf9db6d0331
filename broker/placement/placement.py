"""Who owns what, and under which addresses: the door through which all others ask.

Rules:

- Every lookup, layout, assignment and redirect takes its addresses from here.
- A topic or segment is acquired before it is loaded and released after it is unloaded; so is a
  scalable topic (its `topic://` name) by who controls it.
- What is told here decides where clients go and nothing else: that no two owners acknowledge is
  kept by the fencing of ledgers and by conditional writes.
- `OneBroker` owns everything, writes nothing and watches nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar, Protocol, TypeVar

from broker.placement.typed_request import Request
from config.bounds import PEER_TIMEOUT_S
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.server_error import PeerError, ServerError
from storage.metadata.store import Session
from storage.supervised import EndsForGood

A = TypeVar("A")
H = TypeVar("H")
OwnerListener = Callable[[TopicName], None]
"""Called with a name that has another owner now, or none."""


class OwnedElsewhere(PeerError):
    """Another broker serves it: look it up again.  `owner_id` is that broker, if it is known."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY

    def __init__(self, message: str, owner_id: str = "") -> None:
        super().__init__(message)
        self.owner_id = owner_id


class PlacementNotReady(PeerError):
    """This broker takes nothing now: look it up again, another broker may have it."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY
    http_status: ClassVar[HTTPStatus] = HTTPStatus.SERVICE_UNAVAILABLE


class SupersededProcess(PlacementNotReady, EndsForGood):
    """A later process has this broker's id: it has no session any more, and never will."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where clients reach a broker.  `url_tls` is None while it has no TLS port."""

    url: str
    url_tls: str | None = None
    web_url: str = ""
    broker_id: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """The answer to a lookup: `connect` there, or else ask there, which is then authoritative."""

    address: BrokerAddress
    connect: bool
    here: bool


@dataclass(slots=True)
class PlacementCounters:
    """What is counted while this process runs."""

    acquired: int = 0
    taken_over: int = 0
    """Of those acquired: what another owner had lost, by its end and not by giving it up."""
    released: int = 0
    lost: int = 0
    redirects: int = 0
    sessions_lost: int = 0
    moves: int = 0
    """Topics that this process, as leader, had moved."""


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
    """Interface: which broker owns a name, its addresses, and how to own one here."""

    shared: ClassVar[bool]
    """Whether there may be other brokers."""

    def __init__(self, advertised_host: str) -> None:
        self._host = f"[{advertised_host}]" if ":" in advertised_host else advertised_host
        self._port = 0
        self._http_port = 0
        self.counters = PlacementCounters()

    def listening(self, *, port: int | None = None, http_port: int | None = None) -> None:
        """Take in the ports really used, once the sockets are open."""
        self._port = self._port if port is None else port
        self._http_port = self._http_port if http_port is None else http_port

    @property
    def broker_id(self) -> str:
        """`host:port` of the REST address: Pulsar's broker id."""
        return f"{self._host}:{self._http_port}"

    @property
    def broker_url(self) -> str:
        """`pulsar://...` of this broker."""
        return f"pulsar://{self._host}:{self._port}"

    @property
    def web_url(self) -> str:
        """`http://...` of this broker."""
        return f"http://{self.broker_id}"

    @property
    def me(self) -> BrokerAddress:
        """This broker."""
        return BrokerAddress(self.broker_url, None, self.web_url, self.broker_id)

    @property
    @abstractmethod
    def brokers(self) -> Mapping[str, BrokerAddress]:
        """The live ones, by broker id."""

    @property
    @abstractmethod
    def candidates(self) -> Sequence[str]:
        """Ids of the live brokers that take what nobody owns, sorted."""

    @property
    @abstractmethod
    def leader(self) -> BrokerAddress | None:
        """The broker that looks after balance, if there is one just now."""

    @property
    @abstractmethod
    def draining(self) -> bool:
        """Whether this broker lets go of everything and takes nothing."""

    @property
    @abstractmethod
    def owned(self) -> Sequence[str]:
        """Full names of what this process holds; nothing is written down by a single broker."""

    @abstractmethod
    def owners(self) -> Mapping[str, str]:
        """The broker id of every owner that is known, by full name; {} of a single broker."""

    @property
    @abstractmethod
    def cpu_percent(self) -> float:
        """How much of a core this broker uses, as it last told the others; 0 if it tells nobody."""

    @abstractmethod
    def load_report(self) -> Mapping[str, object]:
        """This broker's record as the others see it, in Pulsar's form."""

    @abstractmethod
    def known_owner(self, name: TopicName) -> BrokerAddress | None:
        """The live broker that owns it; None when nobody does, as far as is known."""

    @abstractmethod
    def owner_of(self, name: TopicName) -> BrokerAddress:
        """As far as known: the owner, else the one that would be chosen now."""

    def controller_of(self, name: TopicName) -> BrokerAddress:
        """The broker whose controller assigns a scalable topic's segments: owner of its name."""
        return self.owner_of(name.in_domain(TopicDomain.TOPIC))

    @abstractmethod
    def owns(self, name: TopicName) -> bool:
        """Whether this process holds it, and its session lives."""

    @abstractmethod
    def place(self, name: TopicName, *, authoritative: bool) -> Placed:
        """Where a client goes.  `authoritative`: another broker has chosen this one.

        Takes nothing: whoever is then asked to serve it does.  Raises `PlacementNotReady`.
        """

    @abstractmethod
    async def acquire(self, name: TopicName) -> None:
        """Hold it; done before a topic is loaded.  May be asked again.

        Raises `OwnedElsewhere`, `PlacementNotReady`, `MetadataError`.
        """

    @abstractmethod
    async def release(self, name: TopicName) -> None:
        """Let go of it, after it is unloaded.  What is not held is no error; never raises."""

    @abstractmethod
    def on_change(self, listener: OwnerListener) -> Callable[[], None]:
        """Call `listener` when a name has another owner, or none; returns its removal.

        Also when this process lost it: with its session, or to a later process.
        """

    @abstractmethod
    def on_brokers(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when brokers come, go, or begin to drain; returns its removal."""

    @abstractmethod
    async def live_session(self) -> Session:
        """The session that this broker's ephemerals hang on, as soon as there is a live one.

        Raises `SupersededProcess` when there never will be, `PlacementNotReady` of a single broker.
        """

    @abstractmethod
    async def call(
        self,
        address: BrokerAddress,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: object = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> object:
        """Ask another broker over REST; its answer, decoded.  Raises `PeerFailed`."""

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
    """The placement of a single broker: it owns everything."""

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
        """See `Placement`.  A single broker has nobody to give anything to."""
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
        """See `Placement`.  There is nobody to tell a load to."""
        return {"webServiceUrl": self.web_url, "pulsarServiceUrl": self.broker_url}

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

    def place(self, name: TopicName, *, authoritative: bool) -> Placed:
        """See `Placement`."""
        return Placed(self.me, connect=True, here=True)

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
        """See `Placement`.  Here everybody has his own."""
        raise PlacementNotReady("A single broker shares no session: open one.")

    async def call(
        self,
        address: BrokerAddress,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: object = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> object:
        """See `Placement`.  There is nobody to ask."""
        raise _no_others(address)

    async def connect(self, address: BrokerAddress) -> PeerConnection:
        """See `Placement`.  There is nobody to connect to."""
        raise _no_others(address)

    async def ask(
        self, address: BrokerAddress, request: Request[H, A], *, timeout_s: float = PEER_TIMEOUT_S
    ) -> A:
        """See `Placement`.  There is nobody to ask."""
        raise _no_others(address)


def _no_others(address: BrokerAddress) -> PlacementNotReady:
    return PlacementNotReady(f"{address.broker_id} is no broker of this cluster: ask this one.")


def _nothing() -> None:
    """The removal of a listener that is never called."""
