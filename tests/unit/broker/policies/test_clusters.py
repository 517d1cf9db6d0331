"""Records of clusters: what one may say, who reads it, and the name of the local cluster."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from broker.policies.cluster_data import (
    ClusterData,
    InvalidClusterData,
    InvalidClusterName,
    cluster_data_in,
    require_cluster_name,
)
from broker.policies.clusters import (
    LOCAL_NAME_KEY,
    ClusterExists,
    ClusterNameDiffers,
    ClusterNotFound,
    ClusterRefused,
    Clusters,
)
from config.bounds import MAX_CLUSTERS
from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from tests.support.embedded_broker import running
from tests.support.waiting import until

PLUGINS = "org.apache.pulsar.client.impl.auth."
EAST = ClusterData(broker_service_url="pulsar://east:6650")
OF_JAVA: dict[str, object] = {
    "serviceUrl": "http://east:8080",
    "serviceUrlTls": "https://east:8443",
    "brokerServiceUrl": "pulsar://east:6650,east-2:6650",
    "brokerServiceUrlTls": "pulsar+ssl://east:6651",
    "authenticationPlugin": f"{PLUGINS}AuthenticationToken",
    "authenticationParameters": "token:s3cret",
    "peerClusterNames": ["west"],
    "brokerClientTlsEnabled": True,
    "tlsAllowInsecureConnection": False,
    "brokerClientTlsEnabledWithKeyStore": False,
    "brokerClientTlsTrustStoreType": "JKS",
    "brokerClientTlsKeyStoreType": "JKS",
    "brokerClientSslFactoryPlugin": "org.apache.pulsar.common.util.DefaultPulsarSslFactory",
    "brokerClientSslFactoryPluginParams": "",
    "brokerClientTrustCertsFilePath": "/etc/ca.pem",
    "listenerName": "external",
}
"""As the Java admin libraries of 4.x and 5.0.0-M1 send it."""
URL: dict[str, object] = {"brokerServiceUrl": "pulsar://east:6650"}


@pytest.fixture
async def store() -> AsyncIterator[MemoryMetadataStore]:
    store = MemoryMetadataStore(SystemClock())
    yield store
    await store.close()


@pytest.fixture
async def clusters(store: MemoryMetadataStore) -> AsyncIterator[Clusters]:
    clusters = Clusters(store, "west")
    await clusters.start()
    yield clusters
    await clusters.stop()


def test_what_the_java_library_sends_is_taken_and_shown_again() -> None:
    data = cluster_data_in(OF_JAVA)
    assert data.url == "pulsar+ssl://east:6651"
    assert data.web_url == "https://east:8443"
    assert data.peer_cluster_names == ("west",)
    shown = data.json()
    assert shown == {member: OF_JAVA[member] for member in shown}
    left_out = OF_JAVA.keys() - shown.keys()
    assert left_out == {
        "brokerClientTlsEnabledWithKeyStore",
        "brokerClientTlsTrustStoreType",
        "brokerClientTlsKeyStoreType",
        "brokerClientSslFactoryPlugin",
        "brokerClientSslFactoryPluginParams",
    }
    assert cluster_data_in(shown) == data


def test_a_cluster_without_tls_is_reached_by_its_plain_urls() -> None:
    data = cluster_data_in(OF_JAVA | {"brokerClientTlsEnabled": False})
    assert (data.url, data.web_url) == ("pulsar://east:6650,east-2:6650", "http://east:8080")
    assert ClusterData(broker_service_url="pulsar://east").web_url is None


def test_a_secret_is_in_no_representation_and_in_no_error() -> None:
    assert "s3cret" not in repr(cluster_data_in(OF_JAVA))
    wrong = OF_JAVA | {"authenticationPlugin": "of my own"}
    with pytest.raises(InvalidClusterData) as caught:
        cluster_data_in(wrong)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("brokerServiceUrl", "http://east:6650"),
        ("brokerServiceUrl", "pulsar+ssl://east:6651"),
        ("brokerServiceUrl", "pulsar://user:secret@east:6650"),
        ("brokerServiceUrl", "pulsar://east:0"),
        ("brokerServiceUrl", 5),
        ("brokerServiceUrlTls", "pulsar://east:6650"),
        ("serviceUrl", "https://east:8443"),
        ("serviceUrl", "http://user:secret@east:8080"),
        ("serviceUrl", "http://east:8080,east-2:8080"),
        ("serviceUrl", "http://east:8080/admin"),
        ("serviceUrl", "http://east:99999"),
        ("serviceUrl", "http://"),
        ("serviceUrlTls", "http://east:8080"),
        ("brokerClientTlsEnabled", "yes"),
        ("peerClusterNames", "west"),
        ("peerClusterNames", [1]),
        ("peerClusterNames", [f"c{number}" for number in range(MAX_CLUSTERS + 1)]),
        ("authenticationPlugin", "org.example.Own"),
        ("authenticationParameters", "token:x"),
        ("brokerClientKeyFilePath", "/etc/key.pem"),
        ("proxyServiceUrl", "pulsar://proxy:4080"),
        ("proxyProtocol", "SNI"),
        ("brokerClientTlsEnabledWithKeyStore", True),
        ("brokerClientTlsTrustStoreType", "PKCS12"),
        ("brokerClientTlsKeyStorePassword", "x"),
        ("brokerClientSslFactoryPlugin", "org.example.Own"),
        ("noSuchMember", None),
    ],
)
def test_a_member_that_cannot_be_used_is_named(member: str, value: object) -> None:
    with pytest.raises(InvalidClusterData, match=member) as caught:
        cluster_data_in(URL | {member: value})
    assert "secret" not in str(caught.value)


OAUTH2 = {"issuerUrl": "https://issuer", "privateKey": "file:///key.json"}


@pytest.mark.parametrize(
    ("plugin", "parameters", "named"),
    [
        *(
            ("oauth2.AuthenticationOAuth2", json.dumps(OAUTH2 | {key: value}), key)
            for key, value in {
                "issuer_url": "https://issuer",
                "clientSecret": "s3cret",
                "connectTimeout": "PT10S",
                "wellKnownMetadataPath": "/.well-known/oauth-authorization-server",
                "tokenEndpointAuthMethod": "tls_client_auth",
                "type": "password",
                "scope": ["produce"],
                "privateKey": "data:application/json;base64,s3cret",
                "issuerUrl": "http://issuer",
            }.items()
        ),
        ("oauth2.AuthenticationOAuth2", json.dumps({"issuerUrl": "https://issuer"}), "privateKey"),
        ("oauth2.AuthenticationOAuth2", "s3cret", "privateKey"),
        ("AuthenticationBasic", '{"userId": "u", "password": "s3cret", "realm": "r"}', "realm"),
        ("AuthenticationBasic", '{"password": "s3cret"', "authenticationParameters"),
        ("AuthenticationTls", "tlsCertFile:/a.pem,tlsKeyFile:/a.key,keyStore:/a.jks", "keyStore"),
        ("AuthenticationTls", "tlsCertFile:/a.pem", "tlsKeyFile"),
        ("AuthenticationTls", "s3cret", "tlsKeyFile"),
        ("AuthenticationToken", "token:", "token"),
    ],
)
def test_authentication_parameters_that_are_not_served_are_named(
    plugin: str, parameters: str, named: str
) -> None:
    body = {
        "authenticationPlugin": PLUGINS + plugin,
        "authenticationParameters": parameters,
    }
    with pytest.raises(InvalidClusterData, match=named) as caught:
        cluster_data_in(URL | body)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ({"serviceUrl": "http://east:8080"}, "brokerServiceUrl"),
        ({"brokerServiceUrlTls": "pulsar+ssl://east"}, "brokerServiceUrl"),
        (URL | {"brokerClientTlsEnabled": True}, "brokerServiceUrlTls"),
    ],
)
def test_a_cluster_without_the_url_that_would_be_used_is_refused(
    body: Mapping[str, object], missing: str
) -> None:
    with pytest.raises(InvalidClusterData, match=f"lacks {missing},"):
        cluster_data_in(body)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", "global", "x" * 5000])
def test_an_invalid_name_of_a_cluster_is_refused(name: str) -> None:
    with pytest.raises(InvalidClusterName):
        require_cluster_name(name)
    require_cluster_name("us-west_1.example:a=b")


async def test_a_registered_cluster_is_known_at_once_and_followed_elsewhere(
    store: MemoryMetadataStore, clusters: Clusters
) -> None:
    other = Clusters(store, "west")
    await other.start()
    changes: list[str] = []
    other.on_change(changes.append)
    await clusters.create("east", EAST)
    assert clusters.get("east") == EAST
    await until(lambda: other.get("east") == EAST)
    assert other.names() == ["east", "west"]
    assert other.get("west") is None
    moved = ClusterData(broker_service_url="pulsar://moved:6650")
    await clusters.change("east", lambda _: moved)
    await until(lambda: other.get("east") == moved)
    await clusters.delete("east")
    await until(lambda: other.names() == ["west"])
    assert set(changes) == {"east"}
    await other.stop()


async def test_a_cluster_that_another_broker_has_just_registered_is_found(
    store: MemoryMetadataStore, clusters: Clusters
) -> None:
    behind = Clusters(store, "west")  # It follows nothing.
    await clusters.create("east", EAST)
    assert behind.get("east") is None
    assert await behind.find("east") == await behind.require("east") == EAST
    for name in ("west", "none", "a/b", ".."):
        assert await behind.find(name) is None
        with pytest.raises(ClusterNotFound):
            await behind.require(name)
    await behind.create(
        "south", ClusterData(broker_service_url="pulsar://s", peer_cluster_names=("east",))
    )


async def test_clusters_that_were_registered_before_are_known_from_the_start(
    store: MemoryMetadataStore, clusters: Clusters
) -> None:
    await clusters.create("east", cluster_data_in(OF_JAVA))
    later = Clusters(store, "west")
    await later.start()
    assert later.get("east") == cluster_data_in(OF_JAVA)
    record = await store.get("/admin/clusters/east")
    assert record is not None
    assert json.loads(record.value) == cluster_data_in(OF_JAVA).json()
    await later.stop()


async def test_an_unreadable_record_is_no_cluster_and_is_replaced(
    store: MemoryMetadataStore, clusters: Clusters
) -> None:
    for value in (b"{", b"[]", b'{"serviceUrl":5}', b"\xff"):
        await store.put("/admin/clusters/east", value)
        assert clusters.get("east") is None
        await clusters.change("east", lambda _: EAST)
        assert clusters.get("east") == EAST


async def test_of_two_changes_at_once_none_is_lost(clusters: Clusters) -> None:
    await clusters.create("east", EAST)
    tries: list[ClusterData] = []

    async def change(**members: str) -> None:
        def changed(data: ClusterData) -> ClusterData:
            tries.append(data)
            return replace(data, **members)  # type: ignore[arg-type]

        await clusters.change("east", changed)

    await asyncio.gather(change(service_url="http://e"), change(listener_name="external"))
    assert len(tries) == 3
    assert clusters.get("east") == replace(EAST, service_url="http://e", listener_name="external")


async def test_a_cluster_is_registered_once(store: MemoryMetadataStore, clusters: Clusters) -> None:
    await clusters.create("east", EAST)
    with pytest.raises(ClusterExists, match="change it with POST"):
        await clusters.create("east", EAST)
    with pytest.raises(ClusterExists, match="the name of this cluster itself"):
        await clusters.create("west", EAST)
    other = Clusters(store, "west")  # It follows nothing, and does not know the cluster.
    with pytest.raises(ClusterExists):
        await other.create("east", EAST)
    for operation in (clusters.delete("none"), clusters.change("none", lambda data: data)):
        with pytest.raises(ClusterNotFound):
            await operation


async def test_more_clusters_than_the_bound_are_refused(clusters: Clusters) -> None:
    for number in range(MAX_CLUSTERS):
        await clusters.create(f"c{number}", EAST)
    with pytest.raises(ClusterRefused, match=f"the maximum is {MAX_CLUSTERS}"):
        await clusters.create("east", EAST)
    await clusters.delete("c0")
    await clusters.create("east", EAST)


async def test_the_local_cluster_is_described_by_settings_alone(clusters: Clusters) -> None:
    for operation in (clusters.delete("west"), clusters.change("west", lambda data: data)):
        with pytest.raises(ClusterRefused, match="cluster_name"):
            await operation


async def test_peers_exist_are_others_and_are_not_deleted(clusters: Clusters) -> None:
    with pytest.raises(ClusterRefused, match="'south' does not exist"):
        await clusters.create(
            "east", ClusterData(broker_service_url="pulsar://e", peer_cluster_names=("south",))
        )
    await clusters.create("east", EAST)
    await clusters.create("south", EAST)
    with pytest.raises(ClusterRefused, match="its own peer"):
        await clusters.change("east", lambda _: ClusterData(peer_cluster_names=("east",)))
    await clusters.change("east", lambda _: ClusterData(peer_cluster_names=("south", "west")))
    with pytest.raises(ClusterRefused, match="peer of east"):
        await clusters.delete("south")


async def test_a_cluster_is_renamed_until_another_one_is_registered(
    store: MemoryMetadataStore, clusters: Clusters
) -> None:
    renamed = Clusters(store, "far-west")
    await renamed.start()
    await renamed.stop()
    assert await store.get(LOCAL_NAME_KEY) is None
    await clusters.create("east", EAST)
    with pytest.raises(ClusterNameDiffers, match="set it to 'west'"):
        await Clusters(store, "far-west").start()
    with pytest.raises(ClusterNameDiffers):
        await renamed.create("south", EAST)
    await clusters.delete("east")
    with pytest.raises(ClusterNameDiffers):
        await Clusters(store, "far-west").start()


async def test_a_broker_with_another_cluster_name_does_not_start(tmp_path: Path) -> None:
    async with running(tmp_path, cluster_name="first"):
        pass
    async with running(tmp_path, cluster_name="west") as broker:
        await broker.clusters.create("east", EAST)
    with pytest.raises(ClusterNameDiffers, match="cluster_name is 'other': set it to 'west'"):
        async with running(tmp_path, cluster_name="other"):
            pass
    async with running(tmp_path, cluster_name="west") as broker:
        assert broker.clusters.get("east") == EAST
