"""Clusters over REST, as tools register them."""

import pytest

from tests.unit.broker.admin.conftest import Rest

CLUSTERS = "/admin/v2/clusters"
NAMESPACES = "/admin/v2/namespaces"
EAST: dict[str, object] = {
    "serviceUrl": "http://east:8080",
    "brokerServiceUrl": "pulsar://east:6650",
    "brokerClientTlsEnabled": False,
    "tlsAllowInsecureConnection": False,
}


async def test_a_cluster_is_registered_shown_changed_and_deleted(rest: Rest) -> None:
    await rest.done("PUT", f"{CLUSTERS}/east", EAST)
    assert await rest.get(CLUSTERS) == ["east", "standalone"]
    assert await rest.get(f"{CLUSTERS}/east") == EAST
    assert "exists" in await rest.refused(409, "PUT", f"{CLUSTERS}/east", EAST)
    moved = EAST | {"brokerServiceUrl": "pulsar://moved:6650"}
    await rest.done("POST", f"{CLUSTERS}/east", moved)
    assert await rest.get(f"{CLUSTERS}/east") == moved
    await rest.done("DELETE", f"{CLUSTERS}/east")
    assert await rest.get(CLUSTERS) == ["standalone"]
    await rest.refused(404, "GET", f"{CLUSTERS}/east")
    await rest.refused(404, "POST", f"{CLUSTERS}/east", EAST)
    await rest.refused(404, "DELETE", f"{CLUSTERS}/east")


async def test_a_cluster_that_cannot_be_used_is_not_registered(rest: Rest) -> None:
    await rest.refused(400, "PUT", f"{CLUSTERS}/east")
    await rest.refused(400, "PUT", f"{CLUSTERS}/east", {})
    await rest.refused(400, "PUT", f"{CLUSTERS}/east", [])
    assert "proxyServiceUrl" in await rest.refused(
        400, "PUT", f"{CLUSTERS}/east", EAST | {"proxyServiceUrl": "pulsar://proxy:1"}
    )
    for name in ("a%20b", "global", "a%2Fb"):
        assert "name of a cluster" in await rest.refused(412, "PUT", f"{CLUSTERS}/{name}", EAST)
    assert await rest.get(CLUSTERS) == ["standalone"]


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
async def test_the_local_cluster_is_not_changed_over_rest(rest: Rest, method: str) -> None:
    shown = await rest.get(f"{CLUSTERS}/standalone")
    status = 409 if method == "PUT" else 412
    body = None if method == "DELETE" else EAST
    reason = await rest.refused(status, method, f"{CLUSTERS}/standalone", body)
    assert method == "PUT" or "cluster_name" in reason
    assert await rest.get(f"{CLUSTERS}/standalone") == shown


async def test_a_cluster_has_peers(rest: Rest) -> None:
    path = f"{CLUSTERS}/east/peers"
    await rest.refused(404, "GET", path)
    await rest.refused(404, "POST", path, ["standalone"])
    await rest.done("PUT", f"{CLUSTERS}/east", EAST)
    assert await rest.get(path) == []
    await rest.done("POST", path, ["standalone", "standalone"])
    assert await rest.get(path) == ["standalone"]
    assert await rest.get(f"{CLUSTERS}/east") == EAST | {"peerClusterNames": ["standalone"]}
    assert "its own peer" in await rest.refused(412, "POST", path, ["east"])
    assert "'south'" in await rest.refused(412, "POST", path, ["south"])
    assert "list of names" in await rest.refused(400, "POST", path, "south")
    assert await rest.get(path) == ["standalone"]
    await rest.done("POST", path, [])
    assert await rest.get(f"{CLUSTERS}/east") == EAST
    assert await rest.get(f"{CLUSTERS}/standalone/peers") == []
    await rest.refused(412, "POST", f"{CLUSTERS}/standalone/peers", ["east"])
