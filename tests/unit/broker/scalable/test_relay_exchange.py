"""What a relaying broker says to the leader, and what it makes of each answer in each state."""

import pytest

from broker.scalable.relay_exchange import (
    RELAY_CLIENT,
    Broken,
    ExchangeState,
    Left,
    NotReady,
    PassOn,
    Refused,
    RelayExchange,
    Say,
)
from magnetar.protocol import pulsar_pb2 as pb
from tests.unit.broker.scalable.relay_answers import CONNECTED, response

Kind = pb.BaseCommand
REQUEST = pb.CommandScalableTopicSubscribe(
    request_id=7,
    topic="topic://public/default/t",
    subscription="s",
    consumer_name="c",
    consumer_id=3,
    consumer_type=pb.STREAM,
)


def assigned(consumer_id: int = 3) -> pb.BaseCommand:
    update = pb.CommandScalableTopicAssignmentUpdate(
        consumer_id=consumer_id, assignment=pb.ScalableConsumerAssignment(layout_epoch=1)
    )
    return pb.BaseCommand(
        type=Kind.SCALABLE_TOPIC_ASSIGNMENT_UPDATE, scalable_topic_assignment_update=update
    )


def error(code: pb.ServerError, message: str = "so it is") -> pb.BaseCommand:
    return pb.BaseCommand(
        type=Kind.ERROR, error=pb.CommandError(request_id=7, error=code, message=message)
    )


SUCCESS = pb.BaseCommand(type=Kind.SUCCESS, success=pb.CommandSuccess(request_id=6))
PING = pb.BaseCommand(type=Kind.PING, ping=pb.CommandPing())
PONG = pb.BaseCommand(type=Kind.PONG, pong=pb.CommandPong())
FIRST = response(assignment=pb.ScalableConsumerAssignment(layout_epoch=0))


def greeted() -> RelayExchange:
    exchange = RelayExchange(REQUEST, "v", 21, pb.FeatureFlags(supports_scalable_topics=True))
    exchange.received(CONNECTED)
    return exchange


def serving() -> RelayExchange:
    exchange = greeted()
    exchange.received(FIRST)
    return exchange


def test_the_client_is_named_and_the_relay_too() -> None:
    features = pb.FeatureFlags(supports_scalable_topics=True)
    connect = RelayExchange(REQUEST, "Pulsar-Java-v5", 19, features).begin().command.connect
    assert connect.client_version == f"{RELAY_CLIENT}Pulsar-Java-v5"
    assert connect.protocol_version == 19
    features.supports_auth_refresh = True
    assert connect.feature_flags == features


def test_the_relay_shows_its_own_credentials_and_again_when_they_are_asked_for() -> None:
    proofs = iter((b"first", b"second"))

    def prove() -> pb.AuthData:
        return pb.AuthData(auth_method_name="token", auth_data=next(proofs))

    exchange = RelayExchange(REQUEST, "v", 21, pb.FeatureFlags(), prove)
    connect = exchange.begin().command.connect
    assert (connect.auth_method_name, connect.auth_data) == ("token", b"first")
    exchange.received(CONNECTED)
    challenge = pb.BaseCommand(
        type=Kind.AUTH_CHALLENGE, auth_challenge=pb.CommandAuthChallenge(server_version="x")
    )
    answer = exchange.received(challenge)
    assert isinstance(answer, Say)
    assert answer.command.auth_response.response.auth_data == b"second"
    assert exchange.state is ExchangeState.REGISTERING


def test_the_request_and_the_answers_are_passed_on_as_they_are() -> None:
    exchange = RelayExchange(REQUEST, "v", 21, pb.FeatureFlags())
    said = exchange.received(CONNECTED)
    assert isinstance(said, Say)
    assert said.command.scalable_topic_subscribe == REQUEST
    assert exchange.received(FIRST) == PassOn(FIRST, first=True)
    assert exchange.received(assigned()) == PassOn(assigned())
    assert exchange.state is ExchangeState.SERVING


def test_a_leader_that_is_not_ready_is_no_answer() -> None:
    refusal = response(error=pb.ServiceNotReady, message="led by another one")
    assert greeted().received(refusal) == NotReady("led by another one")
    assert greeted().received(error(pb.ServiceNotReady)) == NotReady("so it is")


def test_a_metadata_error_of_the_leader_is_no_answer() -> None:
    """Asked directly it would try again itself; what comes through a relay it refuses at once."""
    refusal = response(error=pb.MetadataError, message="too slow")
    assert greeted().received(refusal) == NotReady("too slow")


def test_other_refusals_are_answers() -> None:
    refusal = response(error=pb.NotAllowedError, message="of another kind")
    assert greeted().received(refusal) == Refused(refusal)


def test_an_error_becomes_the_answer_that_the_client_waits_for() -> None:
    refused = greeted().received(error(pb.UnknownError))
    assert refused == Refused(response(error=pb.UnknownError, message="so it is"))


def test_a_handshake_that_is_refused_is_no_answer() -> None:
    exchange = RelayExchange(REQUEST, "v", 21, pb.FeatureFlags())
    assert exchange.received(error(pb.NotAllowedError)) == NotReady("so it is")


def test_leaving() -> None:
    exchange = serving()
    said = exchange.leave()
    assert said is not None
    assert said.command.scalable_topic_unsubscribe.consumer_id == 3
    assert said.command.scalable_topic_unsubscribe.request_id != 7
    assert exchange.received(assigned()) is None
    assert exchange.received(SUCCESS) == Left()


def test_consumer_that_has_closed_down_is_told_of() -> None:
    assert serving().received(SUCCESS) == Left()


def test_leaving_before_the_answer() -> None:
    exchange = greeted()
    assert exchange.leave() is not None
    assert exchange.received(FIRST) is None
    assert exchange.received(error(pb.UnknownError)) == Left()


def test_leaving_before_registration_sends_nothing() -> None:
    assert RelayExchange(REQUEST, "v", 21, pb.FeatureFlags()).leave() is None


@pytest.mark.parametrize("exchange", [greeted(), serving()], ids=["registering", "serving"])
def test_ping_is_answered(exchange: RelayExchange) -> None:
    said = exchange.received(PING)
    assert isinstance(said, Say)
    assert said.command.type == Kind.PONG


@pytest.mark.parametrize(
    "exchange",
    [RelayExchange(REQUEST, "v", 21, pb.FeatureFlags()), greeted(), serving()],
    ids=["greeting", "registering", "serving"],
)
def test_pong_is_no_defect(exchange: RelayExchange) -> None:
    before = exchange.state
    assert exchange.received(PONG) is None
    assert exchange.state is before


def test_silent_leader_gets_one_ping_and_is_given_up() -> None:
    exchange = serving()
    assert exchange.keep_alive() is None, "the first assignment was heard"
    assert exchange.keep_alive() == Say(PING)
    assert isinstance(exchange.keep_alive(), NotReady)


@pytest.mark.parametrize("heard", [PONG, PING, assigned()], ids=["pong", "ping", "assignment"])
def test_leader_that_sends_anything_stays_connected(heard: pb.BaseCommand) -> None:
    exchange = serving()
    exchange.keep_alive()
    for _ in range(3):
        assert exchange.keep_alive() == Say(PING)
        exchange.received(heard)
        assert exchange.keep_alive() is None


@pytest.mark.parametrize(
    ("exchange", "command"),
    [
        (RelayExchange(REQUEST, "v", 21, pb.FeatureFlags()), FIRST),
        (greeted(), CONNECTED),
        (greeted(), assigned()),
        (greeted(), response(request_id=8)),
        (greeted(), SUCCESS),
        (serving(), FIRST),
        (serving(), error(pb.UnknownError)),
        (serving(), assigned(consumer_id=4)),
    ],
)
def test_unexpected_command_breaks_the_exchange(
    exchange: RelayExchange, command: pb.BaseCommand
) -> None:
    assert isinstance(exchange.received(command), Broken)
