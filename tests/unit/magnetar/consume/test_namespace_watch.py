"""The watch of a namespace against a broker made of calls."""

import asyncio

import pytest

from magnetar.bounds import NAMESPACE_QUIET_S, REFUSALS_IN_A_ROW
from magnetar.consume.known_topics import Change, topics_hash
from magnetar.consume.namespace_consumer import NamespaceWatch
from magnetar.errors import MagnetarError, NotAllowed, NotSupported, TopicNotFound
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.backoff import Backoff
from magnetar.wire.attachment import AttachmentState
from magnetar.wire.connection import PeerKind
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.magnetar.layout.fakes import (
    FakeConnection,
    FakePool,
    context_of,
)

WATCH = pb.BaseCommand.WATCH_SCALABLE_TOPICS
CLOSE = pb.BaseCommand.WATCH_SCALABLE_TOPICS_CLOSE
A, B, C = (f"topic://public/default/{name}" for name in "abc")


class Watching:
    """A watch, what it told, and its broker."""

    def __init__(
        self, *, quiet_s: float = NAMESPACE_QUIET_S, max_topics: int = 1000, **properties: str
    ) -> None:
        self.pool = FakePool()
        self.told: list[Change] = []
        self.ended: asyncio.Queue[MagnetarError] = asyncio.Queue()
        self.watch = NamespaceWatch(
            context_of(self.pool),
            "public/default",
            properties,
            changed=self.told.append,
            ended=self.ended.put_nowait,
            quiet_s=quiet_s,
            max_topics=max_topics,
        )

    async def asked(self) -> pb.CommandWatchScalableTopics:
        return (await self.pool.connection.next(WATCH)).watch_scalable_topics

    def answer(self, asked: pb.CommandWatchScalableTopics, **members: object) -> None:
        update = pb.CommandWatchScalableTopicsUpdate(watch_id=asked.watch_id, **members)  # type: ignore[arg-type]
        self.pool.connection.say(
            PeerKind.NAMESPACE,
            asked.watch_id,
            pb.BaseCommand(
                type=pb.BaseCommand.WATCH_SCALABLE_TOPICS_UPDATE,
                watch_scalable_topics_update=update,
            ),
        )

    def snapshot(self, asked: pb.CommandWatchScalableTopics, *topics: str) -> None:
        self.answer(asked, snapshot=pb.ScalableTopicsSnapshot(topics=topics))

    async def open(self, *topics: str) -> pb.CommandWatchScalableTopics:
        opening = asyncio.create_task(self.watch.open(TIMEOUT_S))
        asked = await self.asked()
        self.snapshot(asked, *topics)
        await opening
        return asked

    def lose(self) -> None:
        lost, self.pool.connection = self.pool.connection, FakeConnection()
        lost.lose()


async def test_a_snapshot_opens_it_and_diffs_follow() -> None:
    watching = Watching(team="billing")
    asked = await watching.open(B, A)
    assert asked.namespace == "public/default"
    assert [(each.key, each.value) for each in asked.property_filters] == [("team", "billing")]
    assert not asked.HasField("current_hash")
    watching.answer(asked, diff=pb.ScalableTopicsDiff(added=[C], removed=[A]))
    assert watching.told == [Change((A, B), ()), Change((C,), (A,))]
    assert watching.watch.topics == {B, C}
    await watching.watch.close()
    await watching.pool.connection.next(CLOSE)


async def test_an_empty_namespace_is_an_answer() -> None:
    watching = Watching()
    await watching.open()
    assert watching.told == []
    await watching.watch.close()


async def test_watch_reports_only_the_difference_after_a_reconnect() -> None:
    watching = Watching()
    await watching.open(A, B)
    watching.lose()
    again = await watching.asked()
    assert again.current_hash == topics_hash([A, B])
    watching.snapshot(again, B, C)
    assert watching.told[1:] == [Change((C,), (A,))]
    await watching.watch.close()


async def test_after_a_reconnect_silence_says_that_nothing_changed() -> None:
    watching = Watching(quiet_s=0.01)
    await watching.open(A)
    watching.lose()
    again = await watching.asked()
    await until(lambda: watching.watch.state is AttachmentState.ATTACHED)
    watching.answer(again, diff=pb.ScalableTopicsDiff(added=[B]))
    assert watching.watch.topics == {A, B}
    await watching.watch.close()


async def test_a_refusal_fails_the_opening() -> None:
    watching = Watching()
    opening = asyncio.create_task(watching.watch.open(TIMEOUT_S))
    watching.answer(await watching.asked(), error=pb.NotAllowedError, message="No.")
    with pytest.raises(NotAllowed):
        await opening


async def test_a_namespace_that_is_gone_ends_it_after_some_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Backoff, "pause_s", lambda backoff: 0)
    watching = Watching()
    await watching.open(A)
    watching.lose()
    for _ in range(REFUSALS_IN_A_ROW + 1):
        watching.answer(await watching.asked(), error=pb.TopicNotFound, message="Gone.")
    assert isinstance(await asyncio.wait_for(watching.ended.get(), TIMEOUT_S), TopicNotFound)
    assert watching.watch.topics == {A}
    await watching.watch.close()


async def test_too_many_topics_are_refused() -> None:
    watching = Watching(max_topics=2)
    asked = await watching.open(A, B)
    watching.answer(asked, diff=pb.ScalableTopicsDiff(added=[C]))
    error = await asyncio.wait_for(watching.ended.get(), TIMEOUT_S)
    assert "by properties" in str(error)
    assert watching.told == [Change((A, B), ())]
    await watching.watch.close()


async def test_too_many_topics_right_behind_the_first_answer_are_refused() -> None:
    watching = Watching(max_topics=2)
    opening = asyncio.create_task(watching.watch.open(TIMEOUT_S))
    asked = await watching.asked()
    watching.snapshot(asked, A, B)
    watching.answer(asked, diff=pb.ScalableTopicsDiff(added=[C]))
    with pytest.raises(NotSupported, match="by properties"):
        await opening
    await watching.watch.close()
