"""Lists of other clusters that lack one of the list here are found, and reported."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from broker.replication.errors import RemoteRefused
from broker.replication.list_checks import ListChecks, ReplicationList, incompleteness
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import NamespaceName, parse_topic_name
from tests.support.bounds import set_bound
from tests.support.metrics_text import metrics_text
from tests.support.waiting import until, until_awaited
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster

ALL = frozenset({"east", "middle", "west"})
HOLDER = NamespaceName("public", "default")
HERE = ReplicationList(HOLDER, ALL - {"middle"})


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (ALL, None),
        (ALL | {"north"}, None),
        (frozenset({"east"}), None),
        (frozenset(), None),
        (frozenset({"east", "middle"}), "lacks west,"),
        (frozenset({"east", "west"}), "lacks middle,"),
        (frozenset({"east", "north"}), "lacks middle, west,"),
    ],
)
def test_a_list_that_sends_to_some_clusters_alone_is_incomplete(
    there: frozenset[str], missing: str | None
) -> None:
    found = incompleteness(HERE, "middle", "east", there)
    assert found is None if missing is None else missing in (found or "")


class Others:
    """Other clusters, which answer the lists that a test gives them."""

    def __init__(self, lists: Mapping[str, frozenset[str] | None]) -> None:
        self.lists = dict(lists)
        self.asked: list[tuple[str, ReplicationList]] = []
        self.in_force = {HERE}
        self.tasks = BackgroundTasks(structlog.get_logger(), failure_event="failed")
        self.checks = ListChecks("middle", lambda: self.in_force, self.ask, self.tasks)

    async def ask(self, remote: str, here: ReplicationList) -> frozenset[str] | None:
        """The list of a cluster; one without an entry does not answer."""
        self.asked.append((remote, here))
        if remote not in self.lists:
            raise RemoteRefused(f"{remote} does not answer")
        return self.lists[remote]

    async def settle(self) -> None:
        """Return when nothing is left to ask."""
        for _ in range(20):
            await asyncio.sleep(0)


async def test_a_list_of_many_topics_is_asked_for_once_in_each_other_cluster() -> None:
    others = Others({"east": ALL, "west": ALL})
    for _ in range(1000):
        others.checks.note(ReplicationList(HOLDER, ALL - {"middle"}))
    await others.settle()
    assert others.asked == [("east", HERE), ("west", HERE)]
    assert others.checks.counts == {(HOLDER, "east"): 0, (HOLDER, "west"): 0}
    await others.tasks.stop()


async def test_a_list_with_one_other_cluster_is_not_asked_for() -> None:
    others = Others({"east": frozenset({"east"})})
    others.checks.note(ReplicationList(HOLDER, frozenset({"east"})))
    await others.settle()
    assert others.asked == []
    assert len(asyncio.all_tasks()) == 1


async def test_an_incomplete_list_is_logged_once_and_again_when_it_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "REPLICATION_LISTS_PERIOD_S", 0.01)
    others = Others({"east": ALL - {"west"}, "west": None})
    with capture_logs() as logs:
        others.checks.note(HERE)
        await until(lambda: len(others.asked) > 6)
        assert "lacks west" in (others.checks.report(HERE, "east") or "")
        assert others.checks.report(HERE, "west") is None
        assert others.checks.counts == {(HOLDER, "east"): 1, (HOLDER, "west"): 0}
        others.lists["east"] = ALL
        await until(lambda: not any(others.checks.counts.values()))
    await others.tasks.stop()
    assert [each["event"] for each in logs] == [
        "replication_list_incomplete",
        "replication_list_complete",
    ]


async def test_what_a_cluster_said_last_holds_until_it_says_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "REPLICATION_LISTS_PERIOD_S", 0.01)
    others = Others({"east": ALL - {"west"}, "west": ALL})
    others.checks.note(HERE)
    await until(lambda: others.checks.report(HERE, "east") is not None)
    others.lists["east"] = None
    others.asked.clear()
    await until(lambda: len(others.asked) > 4)
    assert others.checks.report(HERE, "east") is not None
    await others.tasks.stop()


async def test_a_cluster_that_does_not_answer_is_asked_about_one_list_in_a_period() -> None:
    others = Others({"east": ALL})
    lists = [
        ReplicationList(parse_topic_name(f"persistent://public/default/{n}"), HERE.others)
        for n in range(10)
    ]
    for each in lists:
        others.checks.note(each)
    await until(lambda: ("east", lists[-1]) in others.asked)
    await others.settle()
    assert [here for remote, here in others.asked if remote == "west"] == lists[:1]
    others.lists["west"] = ALL - {"east"}
    others.checks.cluster_changed("west")
    await until(lambda: others.checks.counts.get((HOLDER, "west")) == len(lists))
    await others.tasks.stop()


async def test_checks_end_when_no_list_of_three_clusters_is_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "REPLICATION_LISTS_PERIOD_S", 0.01)
    others = Others({"east": ALL - {"west"}, "west": ALL})
    others.checks.note(HERE)
    await until(lambda: any(others.checks.counts.values()))
    others.in_force = set()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert not others.checks.counts
    # And begin again.
    others.in_force = {HERE}
    others.checks.note(HERE)
    await until(lambda: any(others.checks.counts.values()))
    await others.tasks.stop()


async def test_statistics_and_metrics_say_which_list_lacks_which_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATION_LISTS_PERIOD_S", 0.1)
    east, middle, west = clusters = [Cluster(tmp_path, name) for name in ("east", "middle", "west")]
    for each in clusters:
        await each.start()
    await east.set_up([middle])
    await middle.set_up([east, west])
    await west.set_up([east, middle])
    await middle.publish(b"m")

    async def reported() -> dict[str, str]:
        shown = (await middle.stats())["replication"]
        return {name: s["incompleteList"] for name, s in shown.items() if "incompleteList" in s}

    async def names_topic() -> bool:
        return "persistent://public/default/t in" in (await reported()).get("east", "")

    async def in_order() -> bool:
        return not await reported()

    await until_awaited(reported)
    assert await reported() == {
        "east": "The list of clusters of public/default in cluster 'east' lacks west, where "
        "messages of 'east' do not arrive: no cluster sends on what it gets from another one. Add "
        "to that list what is missing, in 'east'."
    }
    await until(middle.is_done)
    labels = 'cluster="middle",namespace="public/default",remote_cluster="east"'
    text = await metrics_text(middle.broker)
    assert f"magnetar_replication_incomplete_lists{{{labels}}} 1.0\n" in text
    # A topic of its own list is compared with that topic there.
    own = f"{NAMESPACE.replace('namespaces', 'persistent')}/t/replication"
    await middle.ask("POST", f"{NAMESPACE}/replication", ["middle"])
    await middle.ask("POST", own, ["east", "middle", "west"])
    await until_awaited(names_topic)
    await east.ask("PUT", "/admin/v2/clusters/west", west.record)
    await east.ask("POST", "/admin/v2/tenants/public", {"allowedClusters": sorted(ALL)})
    await east.replicate(*ALL)
    await until_awaited(in_order)
    for each in clusters:
        await each.stop()
