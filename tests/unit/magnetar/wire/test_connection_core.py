"""The core of a connection: handshake, answers, what comes unasked, silence, the end."""

import gc
import tracemalloc
import weakref

import pytest

from magnetar.bounds import FORGOTTEN_REQUESTS, FRAME_HEADROOM, MAX_MESSAGE_SIZE
from magnetar.errors import (
    MAX_REASON,
    AuthenticationFailed,
    ConnectionLost,
    MagnetarError,
    MetadataFailed,
    TopicNotFound,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import encode_command
from magnetar.protocol.frames import Frame, encode_message
from magnetar.protocol.message import build_entry
from magnetar.wire.connection_core import ConnectionCore, ConnectionState, PeerKind
from tests.unit.magnetar.wire.shells import (
    KEEP_ALIVE_S,
    Kind,
    RecordingHandler,
    RecordingShell,
    command,
    core,
    framed,
    ready_core,
)

NO_REQUEST = 2**64 - 1
Outcome = pb.BaseCommand | MagnetarError


@pytest.fixture
def shell() -> RecordingShell:
    return RecordingShell()


def test_a_frame_above_the_callers_bound_is_refused_whatever_the_broker_announced(
    shell: RecordingShell,
) -> None:
    made = core(shell, max_frame_bytes=1000)
    made.begin(0.0)
    made.received(framed(Kind.CONNECTED, server_version="x", max_message_size=2**30), 1.0)
    assert made.max_message_size == 2**30
    made.received((1000).to_bytes(4, "big") + (996).to_bytes(4, "big"), 1.0)
    assert made.state is ConnectionState.READY
    made = core(shell, max_frame_bytes=1000)
    made.begin(0.0)
    made.received(framed(Kind.CONNECTED, server_version="x", max_message_size=2**30), 1.0)
    made.received((1001).to_bytes(4, "big"), 1.0)
    assert made.state is ConnectionState.ENDED
    assert "1001 bytes is announced and 1000 is the most" in str(shell.ends[-1])


def test_a_broker_that_does_not_read_gets_no_pongs(shell: RecordingShell) -> None:
    made = ready_core(shell)
    shell.writable = False
    made.received(encode_command(pb.BaseCommand(type=Kind.PING, ping=pb.CommandPing())), 1.0)
    assert shell.kinds == []
    shell.writable = True
    made.received(encode_command(pb.BaseCommand(type=Kind.PING, ping=pb.CommandPing())), 1.0)
    assert shell.kinds == [Kind.PONG]


class TestHandshake:
    def test_connect_and_connected(self, shell: RecordingShell) -> None:
        made = core(shell)
        before = made.state
        made.begin(0.0)
        assert shell.kinds == [Kind.CONNECT]
        assert (before, made.state) == (ConnectionState.UNSENT, ConnectionState.GREETING)
        made.received(framed(Kind.CONNECTED, server_version="x", max_message_size=77), 1.0)
        assert made.state is ConnectionState.READY
        assert [each.server_version for each in shell.greetings] == ["x"]
        assert made.max_message_size == 77

    def test_an_error_refuses_with_its_reason(self, shell: RecordingShell) -> None:
        made = core(shell)
        made.begin(0.0)
        made.received(
            framed(Kind.ERROR, request_id=NO_REQUEST, error=pb.AuthenticationError, message="who?"),
            0.0,
        )
        (error,) = shell.ends
        assert isinstance(error, AuthenticationFailed)
        assert "who?" in str(error)
        assert made.state is ConnectionState.ENDED
        assert not shell.greetings

    def test_challenges_are_answered_before_connected(self, shell: RecordingShell) -> None:
        made = core(shell)
        made.begin(0.0)
        for _ in range(2):
            made.received(framed(Kind.AUTH_CHALLENGE, server_version="x"), 0.0)
            before = made.state
            made.prove(b"proof")
            assert (before, made.state) == (ConnectionState.CHALLENGED, ConnectionState.GREETING)
        made.received(framed(Kind.CONNECTED, server_version="x"), 0.0)
        assert made.state is ConnectionState.READY
        assert shell.kinds == [Kind.CONNECT, Kind.AUTH_RESPONSE, Kind.AUTH_RESPONSE]
        response = shell.written[-1].auth_response.response
        assert (response.auth_method_name, response.auth_data) == ("token", b"proof")

    def test_a_refresh_later_leaves_the_connection_ready(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        challenge = command(Kind.AUTH_CHALLENGE)
        challenge.auth_challenge.challenge.auth_data = b"PulsarAuthRefresh"
        made.received(encode_command(challenge), 0.0)
        assert [each.auth_data for each in shell.challenges] == [b"PulsarAuthRefresh"]
        made.prove(b"fresh")
        assert made.state is ConnectionState.READY
        assert shell.written[-1].auth_response.response.auth_data == b"fresh"

    @pytest.mark.parametrize("kind", [Kind.SUCCESS, Kind.CLOSE_PRODUCER, Kind.CONNECT])
    def test_nothing_else_may_come_first(
        self, shell: RecordingShell, kind: pb.BaseCommand.Type
    ) -> None:
        made = core(shell)
        made.begin(0.0)
        fields: dict[pb.BaseCommand.Type, dict[str, object]] = {
            Kind.SUCCESS: {"request_id": 1},
            Kind.CLOSE_PRODUCER: {"producer_id": 1, "request_id": 1},
            Kind.CONNECT: {"client_version": "x"},
        }
        made.received(framed(kind, **fields[kind]), 0.0)
        assert isinstance(shell.ends[0], ConnectionLost)
        assert Kind.Type.Name(kind) in str(shell.ends[0])

    def test_a_second_connected_ends_it(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        made.received(framed(Kind.CONNECTED, server_version="x"), 0.0)
        assert made.state is ConnectionState.ENDED

    def test_ping_is_answered_at_once_and_always(self, shell: RecordingShell) -> None:
        made = core(shell)
        made.begin(0.0)
        made.received(framed(Kind.PING), 0.0)
        made.received(framed(Kind.CONNECTED, server_version="x") + framed(Kind.PING), 0.0)
        assert shell.kinds == [Kind.CONNECT, Kind.PONG, Kind.PONG]

    def test_requests_wait_for_the_handshake(self, shell: RecordingShell) -> None:
        made = core(shell)
        made.begin(0.0)
        with pytest.raises(ConnectionLost, match="not ready"):
            made.request(1, framed(Kind.GET_SCHEMA, request_id=1, topic="x"), lambda _: None)


def ask(made: ConnectionCore, request_id: int, outcomes: list[tuple[int, Outcome]]) -> None:
    made.request(
        request_id,
        framed(Kind.LOOKUP, topic="x", request_id=request_id),
        lambda outcome: outcomes.append((request_id, outcome)),
    )


class TestRequests:
    def test_answers_may_come_in_any_order(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        outcomes: list[tuple[int, Outcome]] = []
        for request_id in (1, 2, 3):
            ask(made, request_id, outcomes)
        for request_id in (3, 1, 2):
            made.received(framed(Kind.SUCCESS, request_id=request_id), 0.0)
        assert [request_id for request_id, _ in outcomes] == [3, 1, 2]
        assert len(made.requests) == 0

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            (Kind.ERROR, {"error": pb.TopicNotFound, "message": "none"}),
            (Kind.LOOKUP_RESPONSE, {"error": pb.TopicNotFound, "message": "none"}),
            (Kind.GET_SCHEMA_RESPONSE, {"error_code": pb.TopicNotFound, "error_message": "none"}),
            (Kind.ACK_RESPONSE, {"consumer_id": 1, "error": pb.TopicNotFound, "message": "none"}),
        ],
    )
    def test_an_answer_with_an_error_is_the_error(
        self, shell: RecordingShell, kind: pb.BaseCommand.Type, fields: dict[str, object]
    ) -> None:
        made = ready_core(shell)
        outcomes: list[tuple[int, Outcome]] = []
        ask(made, 7, outcomes)
        made.received(framed(kind, request_id=7, **fields), 0.0)
        ((_, error),) = outcomes
        assert isinstance(error, TopicNotFound)
        assert str(error) == "none"
        assert made.state is ConnectionState.READY

    def test_error_zero_is_an_error_too(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        outcomes: list[tuple[int, Outcome]] = []
        ask(made, 7, outcomes)
        made.received(framed(Kind.NEW_TXN_RESPONSE, request_id=7, error=pb.UnknownError), 0.0)
        assert isinstance(outcomes[0][1], MagnetarError)

    def test_a_late_answer_to_what_was_cancelled_is_dropped(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        outcomes: list[tuple[int, Outcome]] = []
        ask(made, 1, outcomes)
        ask(made, 2, outcomes)
        made.requests.forget(1)
        made.received(framed(Kind.SUCCESS, request_id=1), 0.0)
        assert (outcomes, made.requests.strays) == ([], 0)
        made.received(framed(Kind.SUCCESS, request_id=2), 0.0)
        assert [request_id for request_id, _ in outcomes] == [2]
        made.received(framed(Kind.SUCCESS, request_id=1), 0.0)
        assert made.requests.strays == 1

    def test_of_what_was_cancelled_only_the_newest_is_remembered(
        self, shell: RecordingShell
    ) -> None:
        made = ready_core(shell)
        for request_id in range(FORGOTTEN_REQUESTS + 1):
            ask(made, request_id, [])
            made.requests.forget(request_id)
        made.received(framed(Kind.SUCCESS, request_id=0), 0.0)
        assert made.requests.strays == 1
        made.received(framed(Kind.SUCCESS, request_id=1), 0.0)
        assert made.requests.strays == 1
        assert made.state is ConnectionState.READY

    def test_a_producer_that_waits_is_answered_when_it_is_ready(
        self, shell: RecordingShell
    ) -> None:
        made = ready_core(shell)
        outcomes: list[Outcome] = []
        postponed: list[bool] = []
        frame = framed(Kind.PRODUCER, topic="x", producer_id=1, request_id=5)
        made.request(5, frame, outcomes.append, lambda: postponed.append(True))
        fields: dict[str, object] = {"request_id": 5, "producer_name": "p"}
        made.received(framed(Kind.PRODUCER_SUCCESS, **fields, producer_ready=False), 0.0)
        assert (outcomes, postponed) == ([], [True])
        made.received(framed(Kind.PRODUCER_SUCCESS, **fields, producer_ready=True), 0.0)
        assert len(outcomes) == 1

    def test_a_lost_connection_fails_what_waits_once(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        outcomes: list[tuple[int, Outcome]] = []
        ask(made, 1, outcomes)
        ask(made, 2, outcomes)
        made.socket_lost("reset")
        made.socket_lost("again")
        assert [request_id for request_id, _ in outcomes] == [1, 2]
        assert all(isinstance(error, ConnectionLost) for _, error in outcomes)
        assert len(shell.ends) == 1
        with pytest.raises(ConnectionLost, match="reset"):
            ask(made, 3, outcomes)

    def test_last_error_of_the_broker_is_in_the_close_reason(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        refusal = {"error": pb.NotAllowedError, "message": "begone"}
        made.received(framed(Kind.ERROR, request_id=NO_REQUEST, **refusal), 0.0)
        made.socket_lost("eof")
        assert "begone" in str(shell.ends[0])

    def test_of_an_endless_reason_the_beginning_is_kept(self, shell: RecordingShell) -> None:
        made, outcomes = ready_core(shell), list[tuple[int, Outcome]]()
        ask(made, 1, outcomes)
        for request_id in (1, NO_REQUEST):
            refusal = {"error": pb.NotAllowedError, "message": "x" * 1_000_000}
            made.received(framed(Kind.ERROR, request_id=request_id, **refusal), 0.0)
        made.socket_lost("eof")
        assert len(str(outcomes[0][1])) == MAX_REASON
        assert MAX_REASON < len(str(shell.ends[0])) < 2 * MAX_REASON


ROUTED = [
    (PeerKind.PRODUCER, Kind.SEND_RECEIPT, {"producer_id": 9, "sequence_id": 1}),
    (
        PeerKind.PRODUCER,
        Kind.SEND_ERROR,
        {"producer_id": 9, "sequence_id": 1, "error": pb.UnknownError, "message": "x"},
    ),
    (PeerKind.PRODUCER, Kind.CLOSE_PRODUCER, {"producer_id": 9, "request_id": NO_REQUEST}),
    (PeerKind.PRODUCER, Kind.TOPIC_MIGRATED, {"resource_id": 9, "resource_type": 0}),
    (PeerKind.CONSUMER, Kind.TOPIC_MIGRATED, {"resource_id": 9, "resource_type": 1}),
    (PeerKind.CONSUMER, Kind.CLOSE_CONSUMER, {"consumer_id": 9, "request_id": NO_REQUEST}),
    (PeerKind.CONSUMER, Kind.REACHED_END_OF_TOPIC, {"consumer_id": 9}),
    (PeerKind.CONSUMER, Kind.ACTIVE_CONSUMER_CHANGE, {"consumer_id": 9}),
    (PeerKind.LAYOUT, Kind.SCALABLE_TOPIC_UPDATE, {"session_id": 9}),
    (PeerKind.NAMESPACE, Kind.WATCH_SCALABLE_TOPICS_UPDATE, {"watch_id": 9}),
    (PeerKind.COORDINATORS, Kind.WATCH_TC_ASSIGNMENTS_UPDATE, {"watch_id": 9}),
]


class TestHandlers:
    @pytest.mark.parametrize(("kind", "number", "fields"), ROUTED)
    def test_unsolicited_command_goes_to_the_handler_it_names(
        self,
        shell: RecordingShell,
        kind: PeerKind,
        number: pb.BaseCommand.Type,
        fields: dict[str, object],
    ) -> None:
        made = ready_core(shell)
        handlers = {each: RecordingHandler() for each in PeerKind}
        for each, handler in handlers.items():
            made.attach(each, 9, handler)
            made.attach(each, 8, RecordingHandler())
        made.received(framed(number, **fields), 0.0)
        told = [each for each, handler in handlers.items() if handler.frames]
        assert told == [kind]
        assert handlers[kind].frames[0].command.type == number

    def test_messages_bring_their_entries(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        handler = RecordingHandler()
        made.attach(PeerKind.CONSUMER, 3, handler)
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
        message = command(Kind.MESSAGE, consumer_id=3)
        message.message.message_id.ledger_id, message.message.message_id.entry_id = 1, 2
        made.received(b"".join(encode_message(message, build_entry(metadata, b"hello"))), 0.0)
        (frame,) = handler.frames
        assert frame.entry is not None
        assert frame.entry.endswith(b"hello")

    def test_command_for_an_unknown_id_is_dropped(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        handler = RecordingHandler()
        made.attach(PeerKind.CONSUMER, 9, handler)
        made.detach(PeerKind.CONSUMER, 9)
        made.received(framed(Kind.REACHED_END_OF_TOPIC, consumer_id=9), 0.0)
        assert not handler.frames
        assert made.state is ConnectionState.READY

    def test_a_handler_is_detached_whatever_its_numbers(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        leaving, staying = RecordingHandler(), RecordingHandler()
        made.attach(PeerKind.CONSUMER, 1, leaving)
        made.attach(PeerKind.LAYOUT, 1, leaving)
        made.attach(PeerKind.CONSUMER, 2, staying)
        made.detach_all(leaving)
        made.socket_lost("eof")
        assert not leaving.losses
        assert len(staying.losses) == 1

    def test_the_end_is_told_once_and_nobody_is_attached_any_more(
        self, shell: RecordingShell
    ) -> None:
        made = ready_core(shell)
        handler = RecordingHandler()
        made.attach(PeerKind.PRODUCER, 1, handler)
        made.socket_lost("eof")
        made.received(framed(Kind.SEND_RECEIPT, producer_id=1, sequence_id=0), 1.0)
        assert len(handler.losses) == 1
        assert not handler.frames
        with pytest.raises(ConnectionLost):
            made.attach(PeerKind.PRODUCER, 1, handler)

    def test_after_an_end_in_the_middle_nothing_more_is_served(self, shell: RecordingShell) -> None:
        made = ready_core(shell)

        class Ending(RecordingHandler):
            def received(self, frame: object) -> None:
                super().received(frame)  # type: ignore[arg-type]
                made.end(ConnectionLost("enough"))

        handler = Ending()
        made.attach(PeerKind.CONSUMER, 1, handler)
        twice = framed(Kind.REACHED_END_OF_TOPIC, consumer_id=1) * 2
        made.received(twice + framed(Kind.PING), 0.0)
        assert len(handler.frames) == 1
        assert Kind.PONG not in shell.kinds


class TestSilence:
    def test_a_broker_that_is_silent_is_asked_and_then_lost(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        assert made.tick(KEEP_ALIVE_S - 1) == pytest.approx(1)
        assert shell.kinds == []
        assert made.tick(KEEP_ALIVE_S) == KEEP_ALIVE_S
        assert shell.kinds == [Kind.PING]
        assert made.tick(KEEP_ALIVE_S + 10) == pytest.approx(KEEP_ALIVE_S - 10)
        assert shell.kinds == [Kind.PING]
        made.tick(2 * KEEP_ALIVE_S)
        assert isinstance(shell.ends[0], ConnectionLost)

    def test_any_byte_is_a_sign_of_life(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        made.tick(KEEP_ALIVE_S)
        made.received(framed(Kind.PONG)[:3], KEEP_ALIVE_S + 1)
        assert made.tick(2 * KEEP_ALIVE_S) == pytest.approx(1)
        assert not shell.ends
        made.tick(2 * KEEP_ALIVE_S + 1)
        assert shell.kinds == [Kind.PING, Kind.PING]


class TestWhatCannotBeRead:
    def test_frames_before_a_broken_one_are_handled(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        handler = RecordingHandler()
        made.attach(PeerKind.CONSUMER, 1, handler)
        good = framed(Kind.REACHED_END_OF_TOPIC, consumer_id=1)
        made.received(good + b"\x00\x00\x00\x05\x00\x00\x00\x01\xff", 0.0)
        assert len(handler.frames) == 1
        assert "cannot be read" in str(shell.ends[0])
        assert len(handler.losses) == 1

    def test_frames_are_joined_from_pieces(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        outcomes: list[tuple[int, Outcome]] = []
        ask(made, 1, outcomes)
        for byte in framed(Kind.SUCCESS, request_id=1):
            made.received(bytes((byte,)), 0.0)
        assert len(outcomes) == 1

    @pytest.mark.parametrize("announced", [0, 1000, 2 * MAX_MESSAGE_SIZE])
    def test_a_frame_may_be_as_large_as_connected_says(
        self, shell: RecordingShell, announced: int
    ) -> None:
        made = ready_core(shell, announced)
        limit = (announced or MAX_MESSAGE_SIZE) + FRAME_HEADROOM
        made.received(limit.to_bytes(4, "big"), 0.0)
        assert not shell.ends
        shell = RecordingShell()
        made = ready_core(shell, announced)
        made.received((limit + 1).to_bytes(4, "big"), 0.0)
        assert len(shell.ends) == 1

    def test_frame_split_behind_connected_is_read_completely(self, shell: RecordingShell) -> None:
        made = core(shell)
        made.begin(0.0)
        ping = framed(Kind.PING)
        connected = framed(Kind.CONNECTED, server_version="x", max_message_size=99)
        made.received(connected + ping[:5], 0.0)
        made.received(ping[5:] + ping, 0.0)
        assert shell.kinds == [Kind.CONNECT, Kind.PONG, Kind.PONG]

    def test_a_broker_sends_no_send(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        send = command(Kind.SEND, producer_id=1, sequence_id=1)
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
        made.received(b"".join(encode_message(send, build_entry(metadata, b""))), 0.0)
        assert "SEND" in str(shell.ends[0])


def test_errors_of_one_kind_do_not_hide_another(shell: RecordingShell) -> None:
    made = ready_core(shell)
    outcomes: list[tuple[int, Outcome]] = []
    ask(made, 1, outcomes)
    made.received(
        framed(Kind.ERROR, request_id=1, error=pb.MetadataError, message="store is away"), 0.0
    )
    error = outcomes[0][1]
    assert isinstance(error, MetadataFailed)
    assert error.retriable


class Failing(RecordingHandler):
    """One with a defect."""

    def received(self, frame: Frame) -> None:
        super().received(frame)
        raise ValueError("of a frame")

    def connection_lost(self, error: ConnectionLost) -> None:
        super().connection_lost(error)
        raise ValueError("of a loss")


class TestDefects:
    """What raises is logged, and nobody else is the worse for it."""

    def test_of_a_handler(self, shell: RecordingShell, caplog: pytest.LogCaptureFixture) -> None:
        made = ready_core(shell)
        handlers = [Failing(), RecordingHandler(), Failing(), RecordingHandler()]
        for number, handler in enumerate(handlers):
            made.attach(PeerKind.CONSUMER, number, handler)
        ended = [
            framed(Kind.REACHED_END_OF_TOPIC, consumer_id=number) for number in range(len(handlers))
        ]
        made.received(b"".join(ended), 0.0)
        assert [len(each.frames) for each in handlers] == [1, 1, 1, 1]
        assert made.state is ConnectionState.READY
        made.socket_lost("gone")
        assert [len(each.losses) for each in handlers] == [1, 1, 1, 1]
        assert len(caplog.records) == 4
        assert "of a loss" in caplog.text

    def test_of_who_asked(self, shell: RecordingShell, caplog: pytest.LogCaptureFixture) -> None:
        def fails(outcome: Outcome) -> None:
            raise ValueError("of an answer")

        made = ready_core(shell)
        handler = RecordingHandler()
        made.attach(PeerKind.CONSUMER, 1, handler)
        outcomes: list[tuple[int, Outcome]] = []
        for request_id in (1, 3):
            made.request(request_id, framed(Kind.LOOKUP, topic="x", request_id=request_id), fails)
            ask(made, request_id + 1, outcomes)
        for request_id in (1, 2):
            made.received(framed(Kind.SUCCESS, request_id=request_id), 0.0)
        made.socket_lost("gone")
        assert [request_id for request_id, _ in outcomes] == [2, 4]
        assert len(handler.losses) == 1
        assert len(caplog.records) == 2


class TestMemory:
    def test_an_ended_connection_holds_no_partial_frame(self, shell: RecordingShell) -> None:
        made = ready_core(shell)
        tracemalloc.start()
        try:
            made.received(b"\x00\x10\x00\x00" + bytes(500_000), 1.0)
            before, _ = tracemalloc.get_traced_memory()
            made.end(ConnectionLost("x"))
            made.received(bytes(500_000), 2.0)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert before > 500_000
        assert after < 100_000

    def test_an_ended_connection_is_freed_without_a_garbage_collection(self) -> None:
        class Socket(RecordingShell):
            """Has the core, as a `Connection` has."""

            def __init__(self) -> None:
                super().__init__()
                self.core = ready_core(self)

        gc.disable()
        try:
            socket = Socket()
            error = ConnectionLost("x")
            socket.core.end(error)
            with pytest.raises(ConnectionLost, match="has ended: x"):
                socket.core.check_usable()
            freed = weakref.ref(socket), weakref.ref(socket.core)
            del socket
            assert [each() for each in freed] == [None, None]
        finally:
            gc.enable()
