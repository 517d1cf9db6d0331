"""Requests to owners: where they are carried out, tries, the next owner, errors by their code."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar, cast

import pytest

from broker.placement import BrokerAddress, OwnedElsewhere, Placement, PlacementNotReady
from broker.placement.owner_requests import (
    OwnedRequest,
    OwnerFailed,
    OwnerRequests,
    OwnerUnavailable,
)
from broker.placement.peer_failed import PeerFailed
from broker.placement.placement import LookupResult
from broker.placement.typed_request import MalformedRequest, Request
from config.bounds import OWNER_HOPS, OWNER_REQUEST_S, OWNER_TRIES
from magnetar.protocol.names import TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

A = TypeVar("A")
TOPIC = parse_topic_name("persistent://public/default/t")
ROOT = Path(__file__).resolve().parents[4]


class Missing(PeerError):
    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


class Busy(PeerError):
    code: ClassVar[ServerError] = ServerError.CONSUMER_BUSY


class Host:
    """Carries requests out here, after failures."""

    def __init__(self, *failures: MagnetarError) -> None:
        self.failures = list(failures)
        self.calls = 0


@dataclass(frozen=True, slots=True)
class Count(OwnedRequest[Host, int]):
    KIND: ClassVar[str] = "test.count"
    topic: TopicName

    @property
    def owned(self) -> TopicName:
        return self.topic

    async def run(self, host: Host) -> int:
        host.calls += 1
        if host.failures:
            raise host.failures.pop(0)
        return host.calls


class Brokers:
    """A placement whose other brokers answer in turn what the test says; then they answer 7."""

    def __init__(
        self, *answers: object, owner: str = "b:2", shared: bool = True, here: bool = True
    ) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.owners: Sequence[str] = [owner]
        self.shared = shared
        self.here = here
        self.broker_id = "a:1"
        ids = ("a:1", "b:2", "c:3", "d:4")
        self.brokers = {each: BrokerAddress("", broker_id=each) for each in ids}

    def owner_of(self, name: TopicName) -> BrokerAddress:
        assert name == TOPIC
        first, *rest = self.owners
        self.owners = rest or [first]
        return self.brokers[first]

    async def live_session(self) -> None:
        return None

    def place(self, name: TopicName, *, authoritative: bool) -> LookupResult:
        assert authoritative, name
        address = self.brokers["a:1" if self.here else "c:3"]
        return LookupResult(address, connect=True, here=self.here)

    async def ask(
        self, owner: BrokerAddress, request: Request[object, A], *, timeout_s: float
    ) -> A:
        assert timeout_s == OWNER_REQUEST_S
        self.asked.append(owner.broker_id)
        answer = self.answers.pop(0) if self.answers else 7
        if isinstance(answer, Exception):
            raise answer
        return request.answer_from_json(answer)

    def requests(self, host: Host | None = None) -> OwnerRequests[Host]:
        errors = {each.code: each for each in (Missing, Busy)}
        placement = cast("Placement", self)
        return OwnerRequests(placement, host or Host(), errors, retry_pause_s=0)


def named(owner: str) -> PeerFailed:
    return PeerFailed("Ask another.", ServerError.SERVICE_NOT_READY, owner_id=owner)


async def test_single_broker_carries_a_request_out_once() -> None:
    host = Host(PlacementNotReady("The test refuses."))
    brokers = Brokers(shared=False)
    with pytest.raises(PlacementNotReady):
        await brokers.requests(host).ask(Count(TOPIC))
    assert (host.calls, brokers.asked) == (1, [])


async def test_owner_is_asked() -> None:
    host, brokers = Host(), Brokers(3)
    assert await brokers.requests(host).ask(Count(TOPIC)) == 3
    assert (host.calls, brokers.asked) == (0, ["b:2"])


async def test_owner_itself_asks_nobody() -> None:
    host, brokers = Host(), Brokers(owner="a:1")
    assert await brokers.requests(host).ask(Count(TOPIC)) == 1
    assert brokers.asked == []


async def test_owner_is_looked_up_again_when_this_broker_is_it_no_more() -> None:
    host, brokers = Host(OwnedElsewhere("The test refuses.")), Brokers(owner="a:1")
    brokers.owners = ["a:1", "b:2"]
    assert await brokers.requests(host).ask(Count(TOPIC)) == 7
    assert (host.calls, brokers.asked) == (1, ["b:2"])


@pytest.mark.parametrize("code", [None, ServerError.SERVICE_NOT_READY])
async def test_owner_is_looked_up_again_when_it_is_not_ready_or_does_not_answer(
    code: object,
) -> None:
    brokers = Brokers(PeerFailed("The test refuses.", code))
    brokers.owners = ["b:2", "c:3"]
    assert await brokers.requests().ask(Count(TOPIC)) == 7
    assert brokers.asked == ["b:2", "c:3"]


@pytest.mark.parametrize("code", [None, ServerError.SERVICE_NOT_READY])
async def test_owner_that_stays_away_is_asked_a_bounded_number_of_times(code: object) -> None:
    brokers = Brokers(*[PeerFailed("The test refuses.", code)] * 100)
    with pytest.raises(OwnerUnavailable, match="b:2 does not serve it: The test refuses"):
        await brokers.requests().ask(Count(TOPIC))
    assert len(brokers.asked) == OWNER_TRIES


@pytest.mark.parametrize(
    ("code", "error"),
    [(ServerError.TOPIC_NOT_FOUND, Missing), (ServerError.CONSUMER_BUSY, Busy)],
)
async def test_known_error_of_the_owner_is_raised_here(
    code: ServerError, error: type[MagnetarError]
) -> None:
    brokers = Brokers(PeerFailed("The test refuses.", code))
    with pytest.raises(error, match=r"^The test refuses.$"):
        await brokers.requests().ask(Count(TOPIC))
    assert brokers.asked == ["b:2"]


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        (ServerError.TOPIC_TERMINATED_ERROR, ServerError.TOPIC_TERMINATED_ERROR),
        (int(ServerError.METADATA_ERROR), ServerError.METADATA_ERROR),
        (99, None),
        ("11", None),
    ],
)
async def test_any_other_error_of_the_owner_keeps_its_code(
    code: object, kept: ServerError | None
) -> None:
    brokers = Brokers(PeerFailed("The test refuses.", code))
    with pytest.raises(OwnerFailed, match="b:2 could not do it: The test refuses") as failed:
        await brokers.requests().ask(Count(TOPIC))
    assert failed.value.owner_code is kept
    assert brokers.asked == ["b:2"]


async def test_malformed_answer_is_the_owners_failure() -> None:
    with pytest.raises(OwnerFailed, match=r"answer to test\.count is malformed"):
        await Brokers("text").requests().ask(Count(TOPIC))


async def test_owner_that_another_broker_names_is_asked_at_once() -> None:
    brokers = Brokers(named("c:3"), named("d:4"))
    assert await brokers.requests().ask(Count(TOPIC)) == 7
    assert brokers.asked == ["b:2", "c:3", "d:4"]


async def test_request_is_carried_out_here_when_another_broker_names_this_one() -> None:
    brokers = Brokers(named("a:1"))
    assert await brokers.requests().ask(Count(TOPIC)) == 1


async def test_named_owner_that_is_not_live_is_looked_up_again() -> None:
    brokers = Brokers(named("gone:9"))
    assert await brokers.requests().ask(Count(TOPIC)) == 7
    assert brokers.asked == ["b:2", "b:2"]


async def test_brokers_that_name_each_other_are_asked_a_bounded_number_of_times() -> None:
    brokers = Brokers(*[named("c:3"), named("b:2")] * 100)
    with pytest.raises(OwnerUnavailable, match="take each other for the owner"):
        await brokers.requests().ask(Count(TOPIC))
    assert len(brokers.asked) == OWNER_TRIES * OWNER_HOPS


async def test_broker_carries_out_what_another_one_asks_if_the_name_is_its_own() -> None:
    assert await Brokers().requests().serve(Count(TOPIC)) == 1


async def test_broker_names_the_owner_to_another_one() -> None:
    with pytest.raises(OwnedElsewhere, match="not served by a:1: ask c:3") as refused:
        await Brokers(here=False).requests().serve(Count(TOPIC))
    assert refused.value.owner_id == "c:3"


def test_malformed_fields_are_refused() -> None:
    for fields in (None, {}, {"topic": 1}, {"topic": "a://b"}, {"topic": str(TOPIC), "more": 1}):
        with pytest.raises(MalformedRequest):
            Count.from_json(fields)


def test_channels_are_opened_in_one_module_and_accepted_in_one() -> None:
    """Nothing else in a broker asks another one over HTTP: credentials have one place each.

    Another cluster has credentials of its own.
    """

    def modules_with(*names: str) -> set[str]:
        return {
            str(path.relative_to(ROOT))
            for path in (ROOT / "broker").rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in names
        }

    assert modules_with("ClientSession", "ws_connect") == {
        "broker/placement/channel_client.py",
        "broker/replication/remote_cluster.py",
    }
    assert modules_with("WebSocketResponse") == {"broker/placement/channel_server.py"}
