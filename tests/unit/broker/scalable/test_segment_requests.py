"""What another broker is asked about a segment: typed requests, and errors that cross."""

from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast

import pytest

from broker.placement import BrokerAddress
from broker.placement.owner_requests import OwnerFailed
from broker.placement.peer_failed import PeerFailed
from broker.placement.typed_request import (
    MalformedRequest,
    PositionOfOneBroker,
    Request,
    encode,
)
from broker.scalable.host import ScalableHost
from broker.scalable.key_sample import KeySample
from broker.scalable.local_segments import LocalSegments
from broker.scalable.segment_requests import (
    SEGMENT_REQUESTS,
    CreateSubscription,
    DeleteSegment,
    DeleteSubscription,
    DropHotLedgers,
    InheritSequences,
    NoteComplete,
    OffloadManifest,
    OffloadSegment,
    PauseSends,
    ResumeSends,
    SampleKeys,
    SealSegment,
    SeekSubscription,
    SeekSubscriptionToTime,
    SegmentRequest,
    SegmentStats,
    SetReplicated,
    SkipSegmentBacklog,
    TakeAnswer,
    TakePositions,
    ViewFinalSequences,
    ViewRunningSegment,
    ViewSegment,
    ViewSubscriptions,
)
from broker.scalable.segment_view import SegmentView, SubscriptionView
from broker.scalable.segments import Segments
from broker.topics.carried_ids import (
    CarriedId,
    FinalIds,
    FinalRanges,
    FinalSequences,
    LiveWriter,
)
from broker.topics.completeness import Completeness
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    PositionsTold,
    SubscriptionState,
)
from broker.topics.topic import SubscriptionNotFound
from config.bounds import OWNER_REQUEST_S
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import SegmentName
from magnetar.protocol.server_error import ServerError
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster
from tests.unit.broker.scalable.node import TOPIC
from tests.unit.broker.scalable.several import hold

A = TypeVar("A")

WHOLE = SegmentName(TOPIC, 0, 0xFFFF, 0)
VIEW = SegmentView(
    sealed=True,
    entries=3,
    producers=1,
    subscriptions={
        "s": SubscriptionView(
            durable=True,
            backlog=2,
            at_end=False,
            consumers=1,
            properties={"k": "v"},
            replicated=True,
        )
    },
    replicator_cursors={"pulsar.repl.west": True},
)
FINALS = FinalSequences(
    [
        FinalIds("p", True, 5, (CarriedId(0, 9, 3, None, None),)),
        FinalIds(
            "q",
            False,
            6,
            (
                CarriedId(0, 9, 3, True, LiveWriter(2**40, None)),
                CarriedId(10, 20, 4, False, LiveWriter(7, 1)),
            ),
        ),
    ],
    [FinalRanges(0, 9, [["east", "0000000000000007", 2, [[3, 1, [[0, 5, 6]]]]]])],
)
TOLD = PositionsTold("east", 2**63, 4, frozenset({0, 3}), {"s": {0: Position(7, 3)}})
LEFT = CopiesLeft(True, {"s": {0: Position(7, 1)}}, frozenset({"t"}))
ANSWERED = CopiesAnswered(
    "west", Position(7, 9), {"s": Position(7, 3)}, {"s": Position(7, 1)}, 2**63
)
REQUESTS: list[SegmentRequest[object]] = [
    ViewSegment(WHOLE),
    ViewRunningSegment(WHOLE),
    SampleKeys(WHOLE),
    CreateSubscription(WHOLE, "s", LATEST, {"k": "v"}),
    CreateSubscription(WHOLE, "s", EARLIEST, completeness=Completeness(True, "c", frozenset("ab"))),
    NoteComplete(WHOLE, "c", ["s", "t"]),
    DeleteSubscription(WHOLE, "s", force=True),
    SetReplicated(WHOLE, "s", replicated=True),
    SeekSubscription(WHOLE, "s", EARLIEST),
    SkipSegmentBacklog(WHOLE, "s"),
    SeekSubscriptionToTime(WHOLE, "s", 7),
    ViewSubscriptions(WHOLE, "west"),
    TakePositions(WHOLE, TOLD),
    TakeAnswer(WHOLE, ANSWERED),
    SealSegment(WHOLE),
    PauseSends(WHOLE, [WHOLE], [SegmentName(TOPIC, 0, 0x7FFF, 1)], "a:1/7"),
    ResumeSends(WHOLE, "a:1/7"),
    ViewFinalSequences(WHOLE, 7),
    InheritSequences(WHOLE, FINALS),
    DeleteSegment(WHOLE),
    DeleteSegment(WHOLE, attempt="7"),
    SegmentStats(WHOLE),
    OffloadSegment(WHOLE, None),
    OffloadSegment(WHOLE, "file:///x"),
    OffloadManifest(WHOLE),
    DropHotLedgers(WHOLE, None),
    DropHotLedgers(WHOLE, [1, 2]),
]


class Elsewhere:
    """A placement whose other broker owns everything, and answers what the test says."""

    shared = True
    broker_id = "a:1"

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.calls: list[tuple[str, object]] = []
        self.brokers: dict[str, BrokerAddress] = {}

    def owner_of(self, _name: object) -> BrokerAddress:
        return BrokerAddress("pulsar://b:1", broker_id="b:2")

    async def ask(
        self, _owner: BrokerAddress, request: Request[object, A], *, timeout_s: float
    ) -> A:
        assert timeout_s == OWNER_REQUEST_S
        self.calls.append((request.KIND, request.to_json()))
        if isinstance(self.answer, Exception):
            raise self.answer
        return request.answer_from_json(self.answer)

    @property
    def placement(self) -> "Elsewhere":
        return self

    def segments(self) -> Segments:
        host, local = cast("ScalableHost", self), cast("LocalSegments", None)
        return Segments(host, local, retry_pause_s=0)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_request_arrives_as_it_was_sent(request_: SegmentRequest[object]) -> None:
    assert SEGMENT_REQUESTS[request_.KIND].from_json(request_.to_json()) == request_


def test_every_kind_of_request_is_tried_here() -> None:
    assert {each.KIND for each in REQUESTS} == SEGMENT_REQUESTS.keys()
    assert len(SEGMENT_REQUESTS) == 23


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (ViewSegment(WHOLE), VIEW),
        (ViewRunningSegment(WHOLE), VIEW),
        (ViewRunningSegment(WHOLE), None),
        (SampleKeys(WHOLE), KeySample({2**31: 3, 7: 1}, 2, 6)),
        (SampleKeys(WHOLE), None),
        (ViewSubscriptions(WHOLE, "west"), SubscriptionState(None, {"s": Position(7, 3)}, False)),
        (TakePositions(WHOLE, TOLD), LEFT),
        (TakeAnswer(WHOLE, ANSWERED), None),
        (SealSegment(WHOLE), None),
        (SegmentStats(WHOLE), {"storageSize": 3, "producers": []}),
        (DropHotLedgers(WHOLE, None), [1, 2]),
    ],
)
async def test_answer_arrives_as_it_was_given(
    request_: SegmentRequest[object], answer: object
) -> None:
    elsewhere = Elsewhere(encode(answer))
    assert await elsewhere.segments().ask(request_) == answer
    assert elsewhere.calls == [(request_.KIND, request_.to_json())]


@pytest.mark.parametrize("answer", [None, [], {"sealed": True}, "text"])
async def test_malformed_answer_is_the_owners_failure(answer: object) -> None:
    with pytest.raises(OwnerFailed, match=r"answer to segment\.view is malformed"):
        await Elsewhere(answer).segments().ask(ViewSegment(WHOLE))


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"segment": str(WHOLE)},
        {"segment": str(WHOLE), "name": "s", "force": 1},
        {"segment": str(WHOLE), "name": None, "force": True},
        {"segment": str(TOPIC), "name": "s", "force": True},
        {"segment": str(WHOLE), "name": "s", "force": True, "more": 1},
    ],
)
def test_malformed_request_is_refused(fields: object) -> None:
    with pytest.raises(MalformedRequest):
        DeleteSubscription.from_json(fields)


def test_field_with_its_default_is_not_sent_and_may_be_absent() -> None:
    """Brokers without attempts take, and send, the request of everything but an undo."""
    assert DeleteSegment(WHOLE).to_json() == {"segment": str(WHOLE)}
    assert DeleteSegment.from_json({"segment": str(WHOLE)}) == DeleteSegment(WHOLE)


async def test_position_of_one_broker_is_refused_and_nobody_is_asked() -> None:
    elsewhere = Elsewhere()
    for request in (
        SeekSubscription(WHOLE, "s", Position(7, 3)),
        CreateSubscription(WHOLE, "s", Position(7, 3)),
    ):
        with pytest.raises(PositionOfOneBroker, match="give EARLIEST or LATEST"):
            await elsewhere.segments().ask(request)
    assert elsewhere.calls == []


async def test_error_of_the_owner_is_raised_here() -> None:
    failure = PeerFailed("The test refuses.", ServerError.SUBSCRIPTION_NOT_FOUND)
    with pytest.raises(SubscriptionNotFound, match="The test refuses"):
        await Elsewhere(failure).segments().ask(SealSegment(WHOLE))


async def test_broker_that_does_not_own_the_segment_names_the_owner(cluster: Cluster) -> None:
    a, b = await cluster.add(), await cluster.add()
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(a, str(WHOLE))
    await until(lambda: b.owner_of(str(WHOLE)) == a.id)
    with pytest.raises(PeerFailed, match=f"not served by {b.id}: ask {a.id}") as failed:
        await a.placement.ask(b.placement.me, ViewSegment(WHOLE))
    assert failed.value.owner_id == a.id
    assert failed.value.error_code == ServerError.SERVICE_NOT_READY
    assert await b.broker.scalable._segments.ask(ViewSegment(WHOLE)) == SegmentView(
        sealed=False, entries=0, producers=0, subscriptions={}, replicator_cursors={}
    )


@dataclass(frozen=True, slots=True)
class MendSegment(SegmentRequest[None]):
    """A request that no broker knows."""

    KIND: ClassVar[str] = "segment.mend"

    async def run(self, segments: LocalSegments) -> None:
        raise AssertionError


@dataclass(frozen=True, slots=True)
class BareDrop(MendSegment):
    """A request that lacks a field."""

    KIND: ClassVar[str] = "segment.drop-hot"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [(MendSegment(WHOLE), "the same version"), (BareDrop(WHOLE), "it needs segment, ledger_ids")],
)
async def test_broker_refuses_a_request_that_it_does_not_know(
    cluster: Cluster, request_: SegmentRequest[None], reason: str
) -> None:
    a, b = await cluster.add(), await cluster.add()
    with pytest.raises(PeerFailed, match=reason) as failed:
        await a.placement.ask(b.placement.me, request_)
    assert failed.value.error_code == ServerError.NOT_ALLOWED_ERROR
