"""Another cluster that answers anything at all: replicators go on once it is mended."""

import random
from functools import partial

import pytest

from config.bounds import REMOTE_FRAME_BYTES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.settings import ClientSettings
from tests.fuzz import corpus
from tests.support.bounds import set_bound
from tests.support.effort import chosen_seed, show_seed
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster
from tests.unit.magnetar.wire.fake_broker import Peer, serving

Kind = pb.BaseCommand
Pair = tuple[Cluster, Cluster]
SEED = 11
TOPICS = [f"persistent://public/default/t{number}" for number in range(3)]
ANSWERS = 400
WRONG = [each for each in FIELD_OF_TYPE if each not in (Kind.SEND, Kind.MESSAGE)]
ANSWER_OF = {
    Kind.PARTITIONED_METADATA: Kind.PARTITIONED_METADATA_RESPONSE,
    Kind.LOOKUP: Kind.LOOKUP_RESPONSE,
    Kind.PRODUCER: Kind.PRODUCER_SUCCESS,
    Kind.GET_OR_CREATE_SCHEMA: Kind.GET_OR_CREATE_SCHEMA_RESPONSE,
    Kind.CLOSE_PRODUCER: Kind.SUCCESS,
}


class Liar:
    """Answers as it should, mostly, and else with anything."""

    def __init__(self, rng: random.Random, answers_of_a_lie: int = 12) -> None:
        """Five of so many answers are no answers to what was asked."""
        self.answers = 0
        self._rng = rng
        self._choices = answers_of_a_lie

    def answer(self, peer: Peer, received: pb.BaseCommand) -> None:
        rng, transport = self._rng, peer.transport
        assert transport is not None
        self.answers += 1
        choice = rng.randrange(self._choices)
        if choice == 0:
            transport.write(rng.randbytes(rng.randrange(1, 100)))
        elif choice == 1:
            transport.write(rng.choice((3, REMOTE_FRAME_BYTES + 1, 2**32 - 1)).to_bytes(4, "big"))
        elif choice == 2:
            transport.abort()
        elif choice == 3:
            error = rng.choice(pb.ServerError.values())
            request_id = self._request_of(received)
            peer.say(Kind.ERROR, request_id=request_id, error=error, message="no\n" * 3000)
        elif choice == 4:
            peer.send(corpus.filled(rng.choice(WRONG)))
        else:
            self._answer_well(peer, received)
            self._say_more(peer, received)

    def _request_of(self, received: pb.BaseCommand) -> int:
        body = getattr(received, FIELD_OF_TYPE[received.type])
        known = getattr(body, "request_id", 0)
        return self._rng.choice((known, known, known, 2**64 - 1))

    def _answer_well(self, peer: Peer, received: pb.BaseCommand) -> None:
        if received.type not in ANSWER_OF:
            return
        rng, request_id = self._rng, self._request_of(received)
        kind = ANSWER_OF[received.type]
        if kind == Kind.PARTITIONED_METADATA_RESPONSE:
            partitions = rng.choice((0, 0, 0, 0, 7, 2**32 - 1))
            peer.say(kind, request_id=request_id, partitions=partitions, response=0)
        elif kind == Kind.LOOKUP_RESPONSE:
            url = rng.choice((*[peer.broker.url] * 6, "", "pulsar://a..b:1", "x", "pulsar://[::1"))
            response = rng.choice((0, 1, 1, 1, 1, 2))
            peer.say(
                kind,
                request_id=request_id,
                broker_service_url=url,
                response=response,
                proxy_through_service_url=rng.randrange(5) == 0,
            )
        elif kind == Kind.PRODUCER_SUCCESS:
            ready = rng.randrange(6) > 0
            peer.say(kind, request_id=request_id, producer_name="", producer_ready=ready)
        else:
            peer.say(kind, request_id=request_id)

    def _say_more(self, peer: Peer, received: pb.BaseCommand) -> None:
        """Of a producer: receipts for nothing, refusals, its end."""
        if received.type != Kind.PRODUCER:
            return
        rng, number = self._rng, received.producer.producer_id
        for _ in range(rng.randrange(4)):
            sequence_id = rng.choice((0, 0, 1, 2**64 - 1))
            choice = rng.randrange(3)
            if choice == 0:
                peer.say(Kind.SEND_RECEIPT, producer_id=number, sequence_id=sequence_id)
            elif choice == 1:
                error = rng.choice(pb.ServerError.values())
                peer.say(
                    Kind.SEND_ERROR,
                    producer_id=number,
                    sequence_id=sequence_id,
                    error=error,
                    message="",
                )
            else:
                peer.say(Kind.CLOSE_PRODUCER, producer_id=number, request_id=1)


async def test_replicators_go_on_after_any_answers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPLICATION_RETRY_MIN_S", "REPLICATION_RETRY_MAX_S", "REACH_RETRY_MAX_S"):
        set_bound(monkeypatch, name, 0.005)
    impatient = partial(ClientSettings, operation_timeout_s=0.2)
    monkeypatch.setattr("broker.replication.access.ClientSettings", impatient)
    seed = chosen_seed(SEED)
    show_seed(seed)
    east, west = pair
    for topic in TOPICS:
        await west.messages(0, topic)
    liar = Liar(random.Random(seed))
    async with serving(liar.answer) as lying:
        record = west.record | {"brokerServiceUrl": lying.url}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        for topic in TOPICS:
            await east.publish(b"0", b"1", topic=topic)
        await until(lambda: liar.answers >= ANSWERS, 60)
        await east.ask("POST", "/admin/v2/clusters/west", west.record)
        for topic in TOPICS:
            await until(partial(east.is_done, topic))
            count = west.broker.topics.loaded()[topic].ledger.entry_count
            # What it said it had is not sent again.
            assert await west.payloads(count, topic) == [b"0", b"1"][2 - count :]
