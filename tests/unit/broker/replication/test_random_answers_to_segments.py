"""Another cluster that answers senders of segments anything: they go on once it is mended."""

import random
from functools import partial

import pytest

from broker.replication.segment_replicator import SegmentReplicator
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.received import Send
from magnetar.settings import ClientSettings
from tests.support.bounds import set_bound
from tests.support.effort import chosen_seed, show_seed
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster
from tests.unit.broker.replication.test_random_answers import Kind, Liar
from tests.unit.broker.replication.test_scalable_topic_backlogs import (
    payloads_of,
    publish,
    replicator_of,
)
from tests.unit.broker.replication.test_scalable_topics import (
    TOPIC,
    failure_of,
    is_done,
    make,
    pair,
    segments_of,
)
from tests.unit.magnetar.wire.fake_broker import Peer, serving

__all__ = ["pair"]

Pair = tuple[Cluster, Cluster]
SEED = 12
ANSWERS = 400


def greet(peer: Peer, received: pb.BaseCommand) -> None:
    """Say that it takes segments of other clusters."""
    flags = pb.FeatureFlags(supports_scalable_topics=True)
    connected = pb.CommandConnected(
        server_version="x", feature_flags=flags, segment_replication=True
    )
    peer.send(pb.BaseCommand(type=Kind.CONNECTED, connected=connected))


class SegmentLiar(Liar):
    """Tells layouts and positions too, which are right, mostly."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, 80)
        self._epoch = 1
        self._session_id = 0

    def take_send(self, peer: Peer, sent: Send) -> None:
        """Answer once, mostly, and to what was sent."""
        rng = self._rng
        self.answers += 1
        for _ in range(rng.choice((0, *[1] * 10, 2))):
            sequence_id = sent.sequence_id + rng.choice((*[0] * 10, 1))
            peer.say(Kind.SEND_RECEIPT, producer_id=sent.producer_id, sequence_id=sequence_id)
        if rng.randrange(12) == 0:
            self._tell_layout(peer)

    def _answer_well(self, peer: Peer, received: pb.BaseCommand) -> None:
        if received.type == Kind.SCALABLE_TOPIC_LOOKUP:
            self._session_id = received.scalable_topic_lookup.session_id
            self._tell_layout(peer)
        elif received.type == Kind.PRODUCER:
            success = pb.CommandProducerSuccess(
                request_id=self._request_of(received),
                producer_name="",
                replicated_ranges=self._ranges(received.producer.topic),
            )
            peer.send(pb.BaseCommand(type=Kind.PRODUCER_SUCCESS, producer_success=success))
        else:
            super()._answer_well(peer, received)

    def _tell_layout(self, peer: Peer) -> None:
        rng = self._rng
        self._epoch = max(0, self._epoch + rng.choice((-1, 0, 1, 1, 1)))
        starts = [0, *sorted(rng.sample(range(1, 65536), rng.randrange(3)))]
        ends = [*(start - 1 for start in starts[1:]), 65535]
        segments = [
            pb.SegmentInfoProto(
                segment_id=rng.choice((10 * self._epoch + number, number)),
                hash_start=start + rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 1)),
                hash_end=end,
                state=rng.choice((pb.ACTIVE, *[pb.ACTIVE] * 20, pb.SEALED)),
                created_at_epoch=self._epoch,
                created_at_ms=rng.choice((1, 1, 1, 1, self._epoch)),
                entry_bucket_splits=rng.choice(((), (), (), (100, 200), (200, 100))),
            )
            for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        if rng.randrange(12) == 0:
            for each in segments:
                each.legacy_topic_name = "persistent://public/default/t"
        dag = pb.ScalableTopicDAG(epoch=self._epoch, segments=segments)
        name = rng.choice((TOPIC, TOPIC, TOPIC, TOPIC, "", "topic://?"))
        update = pb.CommandScalableTopicUpdate(
            session_id=self._session_id, dag=dag, resolved_topic_name=name
        )
        peer.send(pb.BaseCommand(type=Kind.SCALABLE_TOPIC_UPDATE, scalable_topic_update=update))

    def _ranges(self, topic: str) -> list[pb.ReplicatedRange]:
        rng = self._rng
        start = int(topic.rpartition("/")[2].split("-")[0], 16) if topic.startswith("seg") else 0
        found = [pb.ReplicatedRange(hash_start=start, ledger_id=-1, entry_id=-1)]
        if rng.randrange(3) == 0:
            position = rng.choice(((1, 0), (1, 3), (5, 10), (2**62, 0), (-1, 5), (2**63 - 1, 0)))
            ledger_id, entry_id = position
            found.append(
                pb.ReplicatedRange(
                    hash_start=rng.choice((start, start + 1, 65535)),
                    ledger_id=ledger_id,
                    entry_id=entry_id,
                    bucket_hash=rng.choice((65535, 100)),
                )
            )
        return found[rng.randrange(10) == 0 :]


def answered_or_done(liar: Liar, answers: int, east: Cluster) -> bool:
    return liar.answers >= answers or is_done(east)


async def test_segment_senders_go_on_after_any_answers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, failed = list[Exception](), SegmentReplicator.failed

    def note(replicator: SegmentReplicator, error: Exception) -> None:
        failures.append(error)
        failed(replicator, error)

    monkeypatch.setattr(SegmentReplicator, "failed", note)
    for name in ("REPLICATION_RETRY_MIN_S", "REPLICATION_RETRY_MAX_S", "REACH_RETRY_MAX_S"):
        set_bound(monkeypatch, name, 0.005)
    impatient = partial(ClientSettings, operation_timeout_s=0.05)
    monkeypatch.setattr("broker.replication.access.ClientSettings", impatient)
    seed = chosen_seed(SEED)
    show_seed(seed)
    east, west = pair
    await make(east)
    await make(west)
    liar = SegmentLiar(random.Random(seed))
    async with serving(liar.answer, greet) as lying:
        lying.take_send = liar.take_send
        record = west.record | {"brokerServiceUrl": lying.url}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        sent = 0
        while liar.answers < ANSWERS:
            sent += 1
            wanted = liar.answers + 1
            await publish(east, [b"%d" % sent])
            await until(partial(answered_or_done, liar, wanted, east))
        await publish(east, [b"%d" % (sent + each) for each in range(1, 20)])
        await east.ask("POST", "/admin/v2/clusters/west", west.record)
        await until(lambda: is_done(east))
    assert replicator_of(east).failure is None
    # No answer is an error of this broker.
    assert failures == []
    assert "handler_failed" not in caplog.text
    found = [int(each) for each in await payloads_of(west)]
    # What it said it had is not sent again.
    assert found == sorted(set(found))
    assert found[-19:] == list(range(sent + 1, sent + 20))


def answer_attempts(peer: Peer, received: pb.BaseCommand, *, ordinary: str = "") -> None:
    """Answer what is asked before anything is sent; the topic there has one segment.

    `ordinary` is the topic for which it stands.
    """
    if received.type == Kind.LOOKUP:
        peer.say(
            Kind.LOOKUP_RESPONSE,
            request_id=received.lookup.request_id,
            broker_service_url=peer.broker.url,
            response=pb.CommandLookupTopicResponse.Connect,
        )
    elif received.type == Kind.SCALABLE_TOPIC_LOOKUP:
        segment = pb.SegmentInfoProto(
            segment_id=0,
            hash_start=0,
            hash_end=65535,
            state=pb.ACTIVE,
            created_at_epoch=0,
            created_at_ms=1,
            legacy_topic_name=ordinary,
        )
        update = pb.CommandScalableTopicUpdate(
            session_id=received.scalable_topic_lookup.session_id,
            dag=pb.ScalableTopicDAG(epoch=1, segments=[segment]),
        )
        peer.send(pb.BaseCommand(type=Kind.SCALABLE_TOPIC_UPDATE, scalable_topic_update=update))
    elif received.type == Kind.PRODUCER:
        nothing = pb.ReplicatedRange(hash_start=0, ledger_id=-1, entry_id=-1)
        success = pb.CommandProducerSuccess(
            request_id=received.producer.request_id, producer_name="", replicated_ranges=[nothing]
        )
        peer.send(pb.BaseCommand(type=Kind.PRODUCER_SUCCESS, producer_success=success))


async def test_a_topic_that_is_an_ordinary_one_there_is_named_in_the_statistics(
    pair: Pair,
) -> None:
    east, west = pair
    await make(east)
    await make(west)
    answer = partial(answer_attempts, ordinary="persistent://public/default/t")
    async with serving(answer, greet) as ordinary:
        record = west.record | {"brokerServiceUrl": ordinary.url}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        await publish(east, [b"1"])
        await until(lambda: "still an ordinary topic" in failure_of(segments_of(east)[0]))
        await east.ask("POST", "/admin/v2/clusters/west", west.record)
        await until(lambda: is_done(east))
    assert await payloads_of(west) == [b"1"]


async def test_a_late_receipt_of_an_earlier_session_acknowledges_nothing(pair: Pair) -> None:
    east, west = pair
    await make(east)
    await make(west)
    sessions: list[int] = []

    def take_send(peer: Peer, sent: Send) -> None:
        """Close two sessions without an answer, and answer the first one in the second one."""
        sessions.append(sent.producer_id)
        answered = sessions[0] if len(sessions) == 2 else sent.producer_id
        if len(sessions) > 1:
            peer.say(Kind.SEND_RECEIPT, producer_id=answered, sequence_id=sent.sequence_id)
        if len(sessions) < 3:
            peer.say(Kind.CLOSE_PRODUCER, producer_id=sent.producer_id, request_id=1)

    async with serving(answer_attempts, greet) as slow:
        slow.take_send = take_send
        record = west.record | {"brokerServiceUrl": slow.url}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        await publish(east, [b"1"])
        await until(lambda: is_done(east))
    assert len(sessions) == 3
