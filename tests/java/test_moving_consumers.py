"""The official client in two clusters: consumers that move, and topics that store nothing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.fixtures import serving
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StockDriver
from tests.java.two_clusters import register, rest, until

NAMESPACE = "public/default"
COUNT = 40
Pair = tuple[BrokerUnderTest, BrokerUnderTest]


@pytest.fixture(scope="module")
def pair(on_peer: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """East and west, which replicate a namespace to each other."""
    if on_peer:
        pytest.skip("Apache Pulsar replicates no scalable topics")
    names = ["east", "west"]
    with ExitStack() as stack:
        east, west = (
            stack.enter_context(
                contextmanager(serving)(
                    MagnetarProcess(tmp_path_factory.mktemp(name), {"cluster_name": name})
                )
            )
            for name in names
        )
        for broker, name, other in ((east, "west", west), (west, "east", east)):
            register(broker, name, other)
            rest(broker, "POST", "tenants/public", {"allowedClusters": names})
            rest(broker, "POST", f"namespaces/{NAMESPACE}/replication", names)
        yield east, west


def has_moved(topic: str, here: BrokerUnderTest, there: BrokerUnderTest, name: str) -> bool:
    """Whether another cluster has all that is stored here, and nothing of it left to consume."""
    path = f"scalable/{NAMESPACE}/{topic}/stats"
    if rest(here, "GET", path)["replication"][name]["replicationBacklog"]:
        return False
    found = rest(there, "GET", path)["subscriptions"].get("moving")
    return found is not None and found["msgBacklog"] == 0


@pytest.mark.parametrize("kind", ["queue", "stream"])
def test_consumer_goes_on_in_the_other_cluster_and_comes_back(
    pair: Pair, stock_driver_process: StockDriver, kind: str
) -> None:
    east, west = pair
    topic = f"moving-{kind}"
    for broker, segments in ((east, 2), (west, 3)):
        rest(broker, "PUT", f"scalable/{NAMESPACE}/{topic}?numInitialSegments={segments}", {})

    def visit(broker: BrokerUnderTest, prefix: str, send: int, consume: int) -> list[str]:
        given = {"topic": topic, "prefix": prefix, "send": send, "consume": consume, "type": kind}
        facts = run_on_fresh_topic(stock_driver_process, broker, "visit_cluster", **given)
        return sorted(facts["values"])

    def sent(prefix: str) -> list[str]:
        return sorted(f"{prefix}{number}" for number in range(COUNT))

    assert visit(east, "first-", COUNT, COUNT) == sent("first-")
    until(lambda: has_moved(topic, east, west, "west"), "the subscription has not moved west")
    rest(east, "POST", f"scalable/{NAMESPACE}/{topic}/split/0")
    assert visit(west, "second-", COUNT, COUNT) == sent("second-")
    until(lambda: has_moved(topic, west, east, "east"), "the subscription has not moved east")
    assert visit(east, "third-", COUNT, COUNT) == sent("third-")


def test_consumers_of_a_non_persistent_topic_get_what_is_published_in_either_cluster(
    pair: Pair, stock_driver_process: StockDriver
) -> None:
    east, west = pair
    given = {"namespace": NAMESPACE, "remote": west.url}
    facts = run_on_fresh_topic(stock_driver_process, east, "replicated_non_persistent", **given)
    *sent, alone = facts["sent"]
    assert alone["value"] == "for none"
    assert [each["value"] for each in sent] == [f"from here {number}" for number in range(COUNT)]
    assert facts["received"] == [{**each, "origin": "east"} for each in sent]
    back = [(each["value"], each["origin"]) for each in facts["back"]]
    assert back == [(f"from there {number}", "west") for number in range(COUNT)]
