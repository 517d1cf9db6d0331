"""Clusters, and the lists that name them, with the admin libraries of Pulsar 4 and 5."""

from collections.abc import Iterator

import pytest

from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.fixtures import SETTINGS, serving
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StockDriver


@pytest.fixture(params=["v4", "v5"])
def driver(request: pytest.FixtureRequest) -> StockDriver:
    name = "v4_driver_process" if request.param == "v4" else "stock_driver_process"
    driver = request.getfixturevalue(name)
    assert isinstance(driver, StockDriver)
    return driver


@pytest.fixture(scope="module")
def replicating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerUnderTest]:
    """A broker of its own: it keeps other clusters."""
    yield from serving(MagnetarProcess(tmp_path_factory.mktemp("replicating"), SETTINGS))


def test_clusters_are_registered_shown_changed_and_deleted(
    driver: StockDriver, broker: BrokerUnderTest
) -> None:
    facts = run_on_fresh_topic(driver, broker, "clusters")
    assert facts["unknown"] == facts["deleted"] == facts["deleted_again"] == "404"
    assert facts["shown"]
    assert facts["listed"]
    assert facts["again"] == "409"
    assert facts["moved"] == "pulsar://moved:6650"
    assert facts["wrong_url"] == "400"
    assert facts["wrong_name"] == facts["unknown_peer"] == "412"
    assert facts["peers"]
    assert not facts["left"]


def test_tenants_namespaces_and_topics_name_clusters(
    driver: StockDriver, replicating: BrokerUnderTest
) -> None:
    facts = run_on_fresh_topic(driver, replicating, "cluster_lists")
    assert facts["unknown_of_tenant"] == facts["deleted_in_use"] == facts["empty"] == "412"
    assert facts["not_of_tenant"] == "403"
    assert facts["not_allowed"] == facts["too_few_allowed"] == "400"
    assert facts["topic_without_local"] == "412"
    for done in ("created", "allowed", "alone", "rate", "rate_removed"):
        assert facts[done], done
    for of_topic in ("unset", "applied", "removed", "rate", "rate_removed"):
        assert facts[f"topic_{of_topic}"], of_topic
    for of_topic in ("topic", "older", "global", "global_rate", "global_rate_removed"):
        assert facts[of_topic], of_topic
