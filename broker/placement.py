"""Who owns what, and under which addresses.

Rules: every lookup, DAG and assignment takes its addresses from here.  On one broker that is always
this one; several brokers will answer from elections in the metadata store through the same door.
"""

from dataclasses import dataclass

from protocol.names import TopicName


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where clients reach a broker.  `url_tls` is None while it has no TLS port."""

    url: str
    url_tls: str | None = None


class Placement:
    """The placement of a single broker: it owns everything."""

    def __init__(self, advertised_host: str) -> None:
        self._host = f"[{advertised_host}]" if ":" in advertised_host else advertised_host
        self._port = 0
        self._http_port = 0

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

    def owner_of(self, name: TopicName) -> BrokerAddress:
        """The broker that serves a topic or segment."""
        return BrokerAddress(self.broker_url)

    def controller_of(self, name: TopicName) -> BrokerAddress:
        """The broker whose controller assigns a scalable topic's segments."""
        return BrokerAddress(self.broker_url)

    def owns(self, name: TopicName) -> bool:
        """Whether this broker serves it."""
        return True
