"""Magnetar replicates to Apache Pulsar with TLS, authentication and authorization."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import pulsar
import pytest

from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.fixtures import STARTED_PEER, serving
from tests.java.peer_process import PeerProcess
from tests.java.peer_security import PeerSecurity
from tests.java.two_clusters import replication, rest, until
from tests.support.child_process import HOST, free_port

PULSAR: Final = "standalone"
MAGNETAR: Final = "magnetar"
NAMESPACE: Final = "pair/out"
ROLE: Final = "replicator"
TOKEN: Final = "org.apache.pulsar.client.impl.auth.AuthenticationToken"


class Secured(NamedTuple):
    """Magnetar, and the secured Pulsar."""

    magnetar: BrokerUnderTest
    pulsar: BrokerUnderTest
    security: PeerSecurity

    def ask_pulsar(self, method: str, path: str, body: object = None) -> object:
        """A REST request of an administrator there."""
        return rest(self.pulsar, method, path, body, **self.security.admin_headers)

    def record(self, token: str) -> Mapping[str, object]:
        """How Magnetar reaches Pulsar, with a token."""
        return {
            "brokerServiceUrlTls": f"pulsar+ssl://{HOST}:{self.security.tls_port}",
            "serviceUrlTls": f"https://{HOST}:{self.security.http_port_tls}",
            "brokerClientTlsEnabled": True,
            "brokerClientTrustCertsFilePath": str(self.security.authority.chain),
            "authenticationPlugin": TOKEN,
            "authenticationParameters": f"token:{token}",
        }

    def failure(self, topic: str) -> str:
        """Why a topic is not replicated."""
        reason: str = replication(self.magnetar, topic, PULSAR).get("lastFailure", "")
        return reason


@pytest.fixture(scope="module")
def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    if request.config.getoption("--peer", default=None) != STARTED_PEER:
        pytest.skip("the peer is the other cluster, and is started here: add --peer")
    security = PeerSecurity.make(tmp_path_factory.mktemp("security"), free_port(), HOST)
    peer = PeerProcess(free_port(), free_port(), security=security)
    peer.wipe()
    directory = tmp_path_factory.mktemp("magnetar")
    for other in serving(peer):
        for here in serving(MagnetarProcess(directory, {"cluster_name": MAGNETAR})):
            yield Secured(here, other, security)


def test_a_role_without_rights_in_pulsar_waits_for_them(secured: Secured) -> None:
    wrong = secured.record("not a token")
    rest(secured.magnetar, "PUT", f"clusters/{PULSAR}", wrong)
    rest(secured.magnetar, "PUT", "tenants/pair", {"allowedClusters": [MAGNETAR, PULSAR]})
    clusters = {"replication_clusters": [MAGNETAR, PULSAR]}
    rest(secured.magnetar, "PUT", f"namespaces/{NAMESPACE}", clusters)
    secured.ask_pulsar("PUT", "tenants/pair", {"allowedClusters": [PULSAR]})
    secured.ask_pulsar("PUT", f"namespaces/{NAMESPACE}", {"replication_clusters": [PULSAR]})
    topic = f"{NAMESPACE}/guarded"
    client = pulsar.Client(secured.magnetar.url)
    client.create_producer(f"persistent://{topic}").send(b"first")
    client.close()
    until(lambda: "does not accept the credentials" in secured.failure(topic))
    right = secured.record(secured.security.token(ROLE))
    rest(secured.magnetar, "POST", f"clusters/{PULSAR}", right)
    until(lambda: "does not let the role" in secured.failure(topic), secured.failure(topic))
    secured.ask_pulsar("POST", f"namespaces/{NAMESPACE}/permissions/{ROLE}", ["produce"])
    until(lambda: replication(secured.magnetar, topic, PULSAR).get("replicationBacklog") == 0)
    stats = secured.ask_pulsar("GET", f"persistent/{topic}/internalStats")
    assert isinstance(stats, dict)
    assert stats["numberOfEntries"] == 1
