"""What Apache Pulsar's REST has and this broker has not: each path answers 501 and a sentence."""

import asyncio

import pytest

from broker.admin.access import TABLE
from broker.admin.not_served import REASONS, SHADOW_SOURCE, paths
from broker.admin.rest import MAX_BODY_BYTES
from tests.support.waiting import TIMEOUT_S
from tests.unit.broker.admin.conftest import Rest

PERSISTENT = "/admin/v2/persistent/public/default"
NAMESPACE = "/admin/v2/namespaces/public/default"
BUNDLE = "0x00000000_0xffffffff"


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("GET", "/admin/v2/brokers/configuration", "dynamic"),
        ("GET", "/admin/v2/brokers/configuration/values", "dynamic"),
        ("POST", "/admin/v2/brokers/shutdown", "shutdown"),
        ("GET", "/admin/v2/broker-stats/metrics", "java"),
        ("GET", "/admin/v2/bookies/racks-info", "bookies"),
        ("GET", "/admin/v2/clusters/standalone/migrate", "migration"),
        ("GET", "/admin/v2/clusters/standalone/namespaceIsolationPolicies/brokers/b", "isolation"),
        ("GET", "/admin/v2/clusters/standalone/failureDomains/d", "failure-domains"),
        ("GET", "/admin/v2/namespaces/standalone/antiAffinity/group", "anti-affinity"),
        ("PUT", f"{NAMESPACE}/{BUNDLE}/split", "bundles"),
        ("DELETE", f"{NAMESPACE}/{BUNDLE}", "bundles"),
        ("POST", f"{NAMESPACE}/entryFilters", "entry-filters"),
        ("POST", f"{NAMESPACE}/resourcegroup/g", "resource-groups"),
        ("PUT", "/admin/v2/resourcegroups/g", "resource-groups"),
        ("GET", f"{PERSISTENT}/x/shadowTopics", "shadow"),
        ("GET", f"{PERSISTENT}/x/getMessageIdByIndex?index=1", "index"),
        ("GET", f"/admin/v2/non-persistent/public/default/{BUNDLE}", "bundles"),
        ("GET", "/lookup/v2/topic/persistent/public/default/x/bundle", "bundles"),
        ("GET", "/admin/v2/worker/cluster/leader", "worker"),
        ("GET", "/admin/v3/functions/public/default/f/0/status", "functions"),
        ("GET", "/admin/v3/sink/public/default/s", "io"),
        ("DELETE", "/admin/v3/packages/function/public/default/p/v1", "packages"),
        ("GET", "/proxy-stats/topics", "proxy"),
    ],
)
async def test_a_path_that_is_not_served_says_why(
    rest: Rest, method: str, path: str, reason: str
) -> None:
    assert await rest.refused(501, method, path) == REASONS[reason]


async def test_a_function_sent_as_a_form_is_refused_for_what_it_is(rest: Rest) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    status, answer = await rest.raw("POST", "/admin/v3/functions/public/default/f", "--b--", form)
    assert (status, REASONS["functions"] in answer) == (501, True)
    large = "x" * (MAX_BODY_BYTES + 1)
    status, answer = await rest.raw("POST", "/admin/v3/functions/public/default/f", large, form)
    assert (status, REASONS["functions"] in answer) == (501, True)


async def test_a_form_is_refused_when_it_has_come(rest: Rest) -> None:
    """Else a client that still sends it may see its connection closed, and no reason."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rest.port)
    form = b"--b\r\n\r\nx\r\n--b--\r\n"
    head = (
        b"POST /admin/v3/packages/function/public/default/p/v1 HTTP/1.1\r\nHost: broker\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n"
    )
    writer.write(head % len(form))
    answer = asyncio.create_task(reader.readuntil(b"}"))
    for _ in range(5):  # By then the head has been read.
        await rest.get("/admin/v2/brokers/health")
    assert not answer.done()
    writer.write(form)
    async with asyncio.timeout(TIMEOUT_S):
        assert (await answer).startswith(b"HTTP/1.1 501 ")
    writer.close()


async def test_a_shadow_topic_is_refused_and_not_made(rest: Rest) -> None:
    shadow = {SHADOW_SOURCE: "persistent://public/default/source"}
    assert await rest.refused(501, "PUT", f"{PERSISTENT}/x", shadow) == REASONS["shadow"]
    partitioned = {"partitions": 2, "properties": shadow}
    reason = await rest.refused(501, "PUT", f"{PERSISTENT}/p/partitions", partitioned)
    assert reason == REASONS["shadow"]
    assert await rest.get(PERSISTENT) == []
    assert await rest.get(f"{PERSISTENT}/partitioned") == []
    await rest.done("PUT", f"{PERSISTENT}/x")
    assert await rest.refused(501, "PUT", f"{PERSISTENT}/x/properties", shadow) == REASONS["shadow"]


async def test_other_unknown_paths_are_not_found(rest: Rest) -> None:
    await rest.refused(404, "DELETE", f"{NAMESPACE}/unknown")
    await rest.refused(404, "GET", f"{PERSISTENT}/x/unknown")
    assert "no cluster" in await rest.refused(404, "GET", "/admin/v2/brokers/elsewhere")


async def test_the_index_lists_nothing_that_is_not_served(rest: Rest) -> None:
    index = await rest.get("/admin/v2")
    assert isinstance(index, dict)
    listed = {(method, path) for path, methods in index.items() for method in methods}
    assert not listed & set(paths())


def test_nothing_that_is_served_is_listed_as_not_served() -> None:
    served = {
        (method, path)
        for *methods, path, _ in map(str.split, filter(None, TABLE.splitlines()))
        for method in methods
    }
    assert not served & set(paths())


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_is_one_sentence(reason: str) -> None:
    sentence = REASONS[reason]
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0
