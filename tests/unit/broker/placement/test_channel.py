"""The channel between brokers: frames and the states of both ends."""

import json

import pytest

from broker.placement.channel import (
    CHANNEL_MOVES,
    CHANNEL_VERSION,
    FRAME_TYPES,
    Answer,
    AnsweringEnd,
    AskingEnd,
    ChannelBusy,
    ChannelDefect,
    ChannelRefused,
    ChannelState,
    ChannelViolation,
    Event,
    Frame,
    FrameTooLarge,
    Goodbye,
    Hello,
    Refusal,
    RequestFrame,
    goodbye_of,
    read_frame,
    refusal_of,
    write_frame,
)
from broker.placement.placement import OwnedElsewhere
from magnetar.protocol.server_error import ServerError

FRAMES: list[Frame] = [
    Hello(1, "a:1"),
    Goodbye("The test refuses."),
    RequestFrame(7, "test.echo", {"text": "ü", "more": [1, None]}),
    Answer(7, None),
    Answer(7, {"entries": 3}),
    Refusal(7, "The test refuses.", int(ServerError.TOPIC_NOT_FOUND), None),
    Refusal(7, "Ask b.", int(ServerError.SERVICE_NOT_READY), "b:1"),
    Refusal(7, "A defect."),
    Event("test.event", {"number": 1}),
]


def asking(**limits: int) -> AskingEnd:
    """An asking end that is open."""
    end = AskingEnd("a:1", **limits)
    assert end.receive(write_frame(Hello(CHANNEL_VERSION, "b:1"))) is None
    return end


def answering(**limits: int) -> AnsweringEnd:
    """An answering end that is open."""
    end = AnsweringEnd("b:1", **limits)
    assert end.receive(write_frame(Hello(CHANNEL_VERSION, "a:1"))) is None
    return end


def request(request_id: int, fields: object = None) -> str:
    return write_frame(RequestFrame(request_id, "test.echo", fields))


@pytest.mark.parametrize("frame", FRAMES, ids=str)
def test_frame_arrives_as_it_was_sent(frame: Frame) -> None:
    text = write_frame(frame)
    assert text.isascii()
    assert read_frame(text) == frame


def test_every_type_of_frame_is_tried_here() -> None:
    assert {type(each) for each in FRAMES} == set(FRAME_TYPES.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "null",
        "{}",
        '{"type": "SHOUT"}',
        '{"type": ["HELLO"]}',
        '{"type": "HELLO", "version": 1}',
        '{"type": "HELLO", "version": "1", "broker_id": "a:1"}',
        '{"type": "HELLO", "version": true, "broker_id": "a:1"}',
        '{"type": "HELLO", "version": 1, "broker_id": "a:1", "more": 1}',
        '{"type": "ANSWER", "request_id": null, "value": 1}',
    ],
)
@pytest.mark.parametrize("end", [AskingEnd, AnsweringEnd])
def test_malformed_frame_breaks_the_protocol(
    text: str, end: type[AskingEnd] | type[AnsweringEnd]
) -> None:
    with pytest.raises(ChannelViolation, match="look at the log of that broker"):
        end("a:1").receive(text)


def test_request_is_answered_by_its_id_in_any_order() -> None:
    a, b = asking(), answering()
    frames = [b.receive(a.ask("test.echo", {"number": number})[1]) for number in range(3)]
    assert [a.in_flight, b.in_flight] == [3, 3]
    for frame in reversed(frames):
        assert isinstance(frame, RequestFrame)
        text = b.answer(Answer(frame.request_id, frame.fields))
        assert text is not None
        b.sent(frame.request_id)
        assert a.receive(text) == Answer(frame.request_id, frame.fields)
    assert [a.in_flight, b.in_flight] == [0, 0]


def test_refusal_carries_the_code_and_the_owner() -> None:
    a = asking()
    request_id, _ = a.ask("test.echo", None)
    refusal = refusal_of(request_id, OwnedElsewhere("Ask c.", "c:1"))
    assert refusal == Refusal(request_id, "Ask c.", int(ServerError.SERVICE_NOT_READY), "c:1")
    assert a.receive(write_frame(refusal)) == refusal
    assert refusal_of(1, OwnedElsewhere("Ask again.")).owner_id is None


@pytest.mark.parametrize("end", [AskingEnd, AnsweringEnd])
def test_other_version_is_refused_in_a_sentence(
    end: type[AskingEnd] | type[AnsweringEnd],
) -> None:
    one = end("b:1")
    with pytest.raises(ChannelRefused, match=r"a:1 speaks version 99 .* the same version") as error:
        one.receive(write_frame(Hello(99, "a:1")))
    assert one.state is ChannelState.GREETING
    with pytest.raises(ChannelRefused, match="a:1 speaks version 99"):
        AskingEnd("a:1").receive(goodbye_of(error.value))


@pytest.mark.parametrize("end", [AskingEnd, AnsweringEnd])
def test_first_frame_must_be_hello(end: type[AskingEnd] | type[AnsweringEnd]) -> None:
    with pytest.raises(ChannelViolation, match="must be HELLO"):
        end("b:1").receive(request(1))


def test_goodbye_ends_an_open_channel() -> None:
    with pytest.raises(ChannelRefused, match="The test refuses"):
        asking().receive(write_frame(Goodbye("The test refuses.")))


@pytest.mark.parametrize(
    "text",
    [
        write_frame(Hello(1, "b:1")),
        request(1),
        write_frame(Answer(0, None)),
        write_frame(Answer(2, None)),
        write_frame(Refusal(3, "of nothing")),
    ],
)
def test_answer_to_a_request_never_sent_breaks_the_protocol(text: str) -> None:
    a = asking()
    a.ask("test.echo", None)
    with pytest.raises(ChannelViolation, match="answers no request"):
        a.receive(text)


@pytest.mark.parametrize(
    "text", [write_frame(Hello(1, "a:1")), write_frame(Answer(2, None)), request(1), request(0)]
)
def test_only_new_requests_may_follow_hello(text: str) -> None:
    b = answering()
    b.receive(request(1))
    with pytest.raises(ChannelViolation, match="no new request"):
        b.receive(text)


def test_answer_that_comes_too_late_or_twice_is_ignored() -> None:
    a = asking()
    first, second = a.ask("test.echo", None)[0], a.ask("test.echo", None)[0]
    a.give_up(first)
    assert a.receive(write_frame(Answer(first, None))) is None
    assert a.receive(write_frame(Answer(second, 2))) == Answer(second, 2)
    assert a.receive(write_frame(Answer(second, 2))) is None


def test_requests_in_flight_are_bounded_where_they_are_sent() -> None:
    a = asking(max_in_flight=2)
    ids = [a.ask("test.echo", None)[0] for _ in range(2)]
    with pytest.raises(ChannelBusy, match="2 requests wait for b:1"):
        a.ask("test.echo", None)
    a.receive(write_frame(Answer(ids[1], None)))
    assert a.ask("test.echo", None)[0] == ids[1] + 1


def test_requests_in_flight_are_bounded_where_they_are_carried_out() -> None:
    b = answering(max_in_flight=1)
    first = b.receive(request(1))
    assert isinstance(first, RequestFrame)
    refused = b.receive(request(2))
    assert isinstance(refused, Refusal)
    assert (refused.request_id, refused.code) == (2, ServerError.SERVICE_NOT_READY)
    assert read_frame(b.refuse(refused)) == refused
    assert b.answer(Answer(1, None))
    assert isinstance(b.receive(request(3)), Refusal), "the answer has not been sent"
    b.sent(1)
    assert isinstance(b.receive(request(4)), RequestFrame)


def test_frames_are_bounded() -> None:
    a, b = asking(max_frame_bytes=100), answering(max_frame_bytes=100)
    with pytest.raises(FrameTooLarge, match="may have 100: ask for less"):
        a.ask("test.echo", "x" * 100)
    request_id, text = a.ask("test.echo", "x")
    assert request_id == 1
    assert a.in_flight == 1
    b.receive(text)
    answer = b.answer(Answer(1, "x" * 100))
    assert answer is not None
    refused = read_frame(answer)
    assert isinstance(refused, Refusal)
    assert refused.code == ServerError.NOT_ALLOWED_ERROR
    assert "ANSWER has" in refused.reason


def test_events_need_no_request() -> None:
    a, b = asking(), answering(max_frame_bytes=100)
    assert a.receive(b.event("test.event", [1])) == Event("test.event", [1])
    assert b.in_flight == 0
    with pytest.raises(FrameTooLarge, match="EVENT has"):
        b.event("test.event", "x" * 100)
    with pytest.raises(ChannelViolation, match="no new request"):
        b.receive(b.event("test.event", None))


def test_end_that_stops_answers_what_it_has_and_refuses_the_rest() -> None:
    b = answering()
    b.receive(request(1))
    b.stop()
    b.stop()
    refused = b.receive(request(2))
    assert isinstance(refused, Refusal)
    assert refused.code == ServerError.SERVICE_NOT_READY
    assert b.answer(Answer(1, None)) == write_frame(Answer(1, None))


def test_closed_end_has_nothing_in_flight_and_sends_nothing() -> None:
    a, b = asking(), answering()
    b.receive(a.ask("test.echo", None)[1])
    for end in (a, b):
        end.close()
        end.close()
        assert end.in_flight == 0
        assert end.state is ChannelState.CLOSED
    b.stop()
    assert b.answer(Answer(1, None)) is None
    assert b.receive(request(2)) is None
    with pytest.raises(ChannelDefect, match="closed"):
        a.ask("test.echo", None)


def test_nothing_is_asked_before_hello() -> None:
    with pytest.raises(ChannelDefect, match="greeting"):
        AskingEnd("a:1").ask("test.echo", None)


def test_states_are_left_as_the_table_says() -> None:
    assert {state: set(after) for state, after in CHANNEL_MOVES.items()} == {
        ChannelState.GREETING: {ChannelState.OPEN, ChannelState.CLOSED},
        ChannelState.OPEN: {ChannelState.STOPPING, ChannelState.CLOSED},
        ChannelState.STOPPING: {ChannelState.CLOSED},
        ChannelState.CLOSED: set(),
    }


def test_hello_carries_the_version() -> None:
    assert json.loads(AskingEnd("a:1").hello()) == {
        "type": "HELLO",
        "version": CHANNEL_VERSION,
        "broker_id": "a:1",
    }
