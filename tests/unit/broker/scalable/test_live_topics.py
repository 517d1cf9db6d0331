"""Who hears of a topic's changes, though somebody before him has a defect."""

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from broker.policies.namespaces import Namespaces
from broker.scalable.layout import initial, split
from broker.scalable.live_topics import LiveTopic, LiveTopics
from broker.scalable.records import ScalableTopicRecord, decode_topic
from broker.scalable.topic_store import TopicStore
from config.settings import Settings
from magnetar.protocol.names import TopicName
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import Version
from tests.support.clocks import FakeClock
from tests.support.waiting import until
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


async def test_awaited_name_is_watched_until_nobody_awaits_it() -> None:
    store = TopicStore(MemoryMetadataStore(FakeClock()))
    awaited = {TOPIC}
    topics = LiveTopics(store, shared=True, is_awaited=awaited.__contains__)
    topics.follow_name(TOPIC)
    topics.forget_name(TOPIC)
    assert list(topics.watched) == [TOPIC]
    awaited.clear()
    topics.forget_name(TOPIC)
    assert not topics.watched
    await topics.stop()


async def store_with_namespace() -> TopicStore:
    """A store with the namespace in which topics are created."""
    metadata = MemoryMetadataStore(FakeClock())
    await Namespaces(metadata, Settings()).start()
    return TopicStore(metadata)


async def test_name_of_a_topic_that_is_gone_is_not_watched_any_more() -> None:
    store = await store_with_namespace()
    stored = await store.create(TOPIC, ScalableTopicRecord(initial(1, now_ms=1)))
    topics = LiveTopics(store, shared=True)
    live = topics.add(stored)
    assert list(topics.watched) == [TOPIC]
    # Another broker deletes it: the watch says so.
    await store.remove(stored)
    await until(lambda: not topics.watched)
    topics.add(await store.create(TOPIC, live.stored.record))
    live = await topics.get(TOPIC)
    topics.begin_deletion(live)
    topics.end_deletion(TOPIC)
    assert not topics.watched
    await topics.stop()


async def test_record_that_did_not_change_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await store_with_namespace()
    topics = LiveTopics(store)
    stored = await store.create(TOPIC, ScalableTopicRecord(initial(4, now_ms=1)))
    topics.add(stored)
    decoded: list[bytes] = []

    def counted(value: bytes) -> ScalableTopicRecord:
        decoded.append(value)
        return decode_topic(value)

    monkeypatch.setattr("broker.scalable.topic_store.decode_topic", counted)
    for _ in range(10):
        await topics.refresh(TOPIC)
    assert not decoded
    later = split(stored.record.layout, 0, now_ms=2).layout
    await store.change(stored, ScalableTopicRecord(later))
    found = await topics.refresh(TOPIC)
    assert found is not None
    assert (found.record.layout.epoch, len(decoded)) == (1, 1)
    await store.remove(found)
    await store.create(TOPIC, stored.record)
    again = await topics.refresh(TOPIC)
    assert again is not None
    assert again.record.layout.epoch == 0
