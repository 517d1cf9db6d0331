"""Who hears of a topic's changes, though somebody before him has a defect."""

from dataclasses import replace

from structlog.testing import capture_logs

from broker.scalable.live_topics import LiveTopic
from magnetar.protocol.names import TopicName
from storage.metadata.store import Version
from tests.unit.broker.scalable.node import TOPIC, Node

DEFECT = RuntimeError("a defect")


def fails(_: LiveTopic | TopicName) -> None:
    raise DEFECT


async def test_a_listener_with_a_defect_hides_no_layout_from_those_after_it(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    topics, heard = node.scalable._topics, list[int]()
    topics.on_layout(fails)
    topics.on_layout(lambda live: heard.append(live.layout.epoch))
    with capture_logs() as logs:
        await node.scalable.split(TOPIC, 0)
    assert heard == [1]
    told = [one for one in logs if one["event"] == "topic_record_listener_failed"]
    assert [(one["topic"], one["exc_info"]) for one in told] == [(str(TOPIC), True)]


async def test_a_listener_with_a_defect_hides_no_renewal_from_those_after_it(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    topics, heard = node.scalable._topics, list[TopicName]()
    topics.on_renewal(fails)
    topics.on_renewal(heard.append)
    live = await topics.get(TOPIC)
    # Of an earlier topic of that name: what is stored is no later state of it.
    live.stored = replace(
        live.stored, version=Version(-2), modifications=live.stored.modifications + 1
    )
    with capture_logs():
        await topics.refresh(TOPIC)
    assert heard == [TOPIC]
    assert topics.known(TOPIC) is None
