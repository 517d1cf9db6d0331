"""Partitioned topics over REST, in the forms that the admin clients of Pulsar send."""

import json
from pathlib import Path

import pytest

from tests.support.embedded_broker import running
from tests.unit.broker.admin.conftest import Rest, asking_broker

PERSISTENT = "/admin/v2/persistent/public/default"
JSON = "application/json"
METADATA = "application/vnd.partitioned-topic-metadata+json"


@pytest.mark.parametrize(
    ("text", "content_type"),
    [
        ("2", JSON),
        ('"2"', JSON),
        ('{"properties":null,"partitions":2}', METADATA),
        ('{"partitions":2,"deleted":false,"properties":{}}', METADATA),
    ],
)
async def test_a_number_of_partitions_comes_in_two_forms(
    rest: Rest, text: str, content_type: str
) -> None:
    path = f"{PERSISTENT}/p/partitions"
    assert await rest.send("PUT", path, text, content_type) == (204, "")
    assert await rest.get(path) == {"partitions": 2, "deleted": False}


async def test_partitions_are_added_by_a_number_or_its_text(rest: Rest) -> None:
    path = f"{PERSISTENT}/p/partitions"
    wanted = {"properties": {"team": "a"}, "partitions": 1}
    assert await rest.send("PUT", path, json.dumps(wanted), METADATA) == (204, "")
    assert await rest.send("POST", path, '"2"', JSON) == (204, "")
    assert await rest.send("POST", path, "3", JSON) == (204, "")
    kept = {"partitions": 3, "deleted": False, "properties": {"team": "a"}}
    assert await rest.get(path) == kept
    assert "only when" in await rest.refused(406, "POST", path, {"partitions": 4})


async def test_partitions_are_created_without_being_loaded(tmp_path: Path) -> None:
    """So that many of them take no memory until they are used."""
    names = [f"persistent://public/default/p-partition-{number}" for number in range(3)]
    changes: list[tuple[str, bool]] = []
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        broker.topics.on_change(lambda name, exists: changes.append((str(name), exists)))
        await rest.done("PUT", f"{PERSISTENT}/p/partitions", 2)
        assert dict(broker.topics.loaded()) == {}
        assert dict(broker.managed_ledgers.loaded()) == {}
        await rest.done("POST", f"{PERSISTENT}/p/partitions", 3)
        # The first one is asked for the subscriptions that new ones get.
        assert list(broker.topics.loaded()) == names[:1]
        assert await rest.get(PERSISTENT) == names
        assert sorted(changes) == [(name, True) for name in names]
        await rest.done("DELETE", f"{PERSISTENT}/p/partitions")
        assert await rest.get(PERSISTENT) == []


@pytest.mark.parametrize(
    "wanted",
    [
        {"partitions": 2, "replicas": 3},
        {"partitions": 2, "deleted": True},
        {"partitions": 2, "properties": {"team": 1}},
        {"partitions": 2, "properties": ["team"]},
        {"partitions": 2, "properties": {"magnetar.trimmed": "1:1"}},
        {"partitions": "two"},
        {"properties": {"team": "a"}},
        {"partitions": True},
        {"partitions": 0},
        2.5,
        True,
        "",
        None,
    ],
)
async def test_partition_metadata_that_cannot_be_kept_is_refused(
    rest: Rest, wanted: object
) -> None:
    text = json.dumps(wanted)
    status, answer = await rest.send("PUT", f"{PERSISTENT}/p/partitions", text, METADATA)
    assert status in (400, 406)
    assert json.loads(answer)["reason"].endswith(".")
    assert await rest.get(f"{PERSISTENT}/partitioned") == []


async def test_properties_of_a_partitioned_topic(rest: Rest) -> None:
    path = f"{PERSISTENT}/p/partitions"
    wanted = {"properties": {"team": "a"}, "partitions": 2}
    assert await rest.send("PUT", path, json.dumps(wanted), METADATA) == (204, "")
    await keeps_properties(rest, "p")
    assert await rest.get(path) == {
        "partitions": 2,
        "deleted": False,
        "properties": {"tier": "gold"},
    }
    assert await rest.get(f"{PERSISTENT}/p-partition-0/properties") == {}


async def test_properties_of_a_topic_without_partitions(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x", {"team": "a"})
    await keeps_properties(rest, "x")
    await rest.done("PUT", f"{PERSISTENT}/x/unload")
    assert await rest.get(f"{PERSISTENT}/x/properties") == {"tier": "gold"}
    await rest.refused(400, "PUT", f"{PERSISTENT}/y", {"team": 1})
    await rest.refused(400, "PUT", f"{PERSISTENT}/y", 3)
    await rest.refused(404, "GET", f"{PERSISTENT}/y/properties")


async def keeps_properties(rest: Rest, topic: str) -> None:
    """Of a topic that was made with team=a: read, changed, taken away."""
    path = f"{PERSISTENT}/{topic}/properties"
    assert await rest.get(path) == {"team": "a"}
    await rest.done("PUT", path, {"tier": "gold"})
    assert await rest.get(path) == {"team": "a", "tier": "gold"}
    await rest.done("DELETE", f"{path}?key=team")
    assert await rest.get(path) == {"tier": "gold"}
    await rest.refused(400, "PUT", path, {"tier": None})
    await rest.refused(400, "PUT", path, {"magnetar.trimmed": "1:1"})
    await rest.refused(412, "DELETE", path)
    assert await rest.get(path) == {"tier": "gold"}
