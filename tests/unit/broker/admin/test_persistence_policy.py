"""The persistence policy over REST, of a broker that is alone."""

from pathlib import Path

import pytest

from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.unit.broker.admin.conftest import Rest, asking_broker

NAMESPACE = "/admin/v2/namespaces/public/default/persistence"
TOPIC = "/admin/v2/persistent/public/default/t"
COPIES = {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 1, "bookkeeperAckQuorum": 1}
RATE = "managedLedgerMaxMarkDeleteRate"


async def test_a_topics_policy_comes_before_its_namespaces_and_the_brokers(rest: Rest) -> None:
    await rest.done("PUT", TOPIC)
    topic = f"{TOPIC}/persistence"
    assert await rest.call("GET", NAMESPACE) == await rest.call("GET", topic) == (204, "")
    assert await rest.get(f"{topic}?applied=true") == COPIES | {RATE: 10.0}
    await rest.done("POST", NAMESPACE, COPIES | {RATE: 0.0})
    assert await rest.get(NAMESPACE) == COPIES | {RATE: 0.0}
    assert await rest.get(f"{topic}?applied=true") == COPIES | {RATE: 0.0}
    await rest.done("POST", f"{topic}?isGlobal=true", COPIES | {RATE: 1.0})
    assert await rest.get(f"{topic}?applied=true") == COPIES | {RATE: 1.0}
    await rest.done("POST", topic, COPIES | {RATE: 0.5})
    assert await rest.get(topic) == COPIES | {RATE: 0.5}
    assert await rest.get(f"{topic}?applied=true") == COPIES | {RATE: 0.5}
    for path in (topic, f"{topic}?isGlobal=true", NAMESPACE):
        await rest.done("DELETE", path)
    assert await rest.get(f"{topic}?applied=true") == COPIES | {RATE: 10.0}


@pytest.mark.parametrize("path", [NAMESPACE, f"{TOPIC}/persistence"])
async def test_a_policy_that_cannot_be_is_refused(rest: Rest, path: str) -> None:
    await rest.done("PUT", TOPIC)
    two = dict.fromkeys(COPIES, 2)
    assert "data directory" in await rest.refused(412, "POST", path, two)
    wrong_order = COPIES | {"bookkeeperAckQuorum": 2}
    assert "bookkeeperAckQuorum" in await rest.refused(412, "POST", path, wrong_order)
    stored_elsewhere = COPIES | {"managedLedgerStorageClassName": "other"}
    reason = await rest.refused(412, "POST", path, stored_elsewhere)
    assert "no managedLedgerStorageClassName" in reason
    assert await rest.call("GET", path) == (204, "")


async def test_a_new_namespace_may_come_with_a_policy(rest: Rest) -> None:
    base = "/admin/v2/namespaces/public"
    await rest.done("PUT", f"{base}/a", {"persistence": COPIES})
    assert await rest.get(f"{base}/a/persistence") == COPIES
    two = dict.fromkeys(COPIES, 2)
    assert "data directory" in await rest.refused(412, "PUT", f"{base}/b", {"persistence": two})
    await rest.done("PUT", f"{base}/b", {"persistence": None})
    assert await rest.call("GET", f"{base}/b/persistence") == (204, "")


async def test_the_streams_of_partitions_and_segments_have_the_policy_of_their_topic(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        await rest.done("PUT", f"{TOPIC}/partitions", 2)
        await rest.done("PUT", "/admin/v2/scalable/public/default/s?numInitialSegments=2")
        names = (
            "persistent://public/default/t-partition-1",
            "persistent://public/default/other",
            "segment://public/default/s/0000-7fff-0",
        )
        await broker.policies.require(parse_topic_name(names[0]))

        def rates() -> list[float]:
            paths = [parse_topic_name(name).ledger_path for name in names]
            return [broker.policies.persistence(path).cursor_writes_per_s for path in paths]

        assert rates() == [10, 10, 10]
        await rest.done("POST", NAMESPACE, COPIES | {RATE: 5})
        assert rates() == [5, 5, 5]
        await rest.done("POST", f"{TOPIC}/persistence", COPIES | {RATE: 2})
        scalable = "/admin/v2/persistent/public/default/s/persistence"
        await rest.done("POST", f"{scalable}?isGlobal=true", COPIES | {RATE: 3})
        assert rates() == [2, 5, 3]
        await rest.done("DELETE", f"{TOPIC}/persistence")
        assert rates() == [5, 5, 3]
