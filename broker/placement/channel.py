"""Pure: the channel between two brokers, as frames and the state of each of its ends.

One broker asks (`AskingEnd`), the other answers (`AnsweringEnd`).  Each frame is one text message:
a JSON object whose `type` is a key of FRAME_TYPES.

Rules:

- C1: both ends send HELLO first.  Ends of different versions, or an asking end whose first frame is
  another one, get GOODBYE with a sentence.
- C2: each REQUEST is answered once, by ANSWER or REFUSAL with its id.  Answers come in any order.
- C3: ids of requests increase.  An answer to a request that the caller gave up is ignored; an
  answer to a request that was never sent breaks the protocol.
- C4: CHANNEL_REQUESTS_IN_FLIGHT bounds the requests without an answer, at both ends.
- C5: CHANNEL_FRAME_BYTES bounds every frame.  An end refuses to send a larger one.
- C6: an end that stops refuses new requests and answers those that it has.
- C7: EVENTs arrive in the order in which they were sent.  They tell of what an earlier request of
  the same connection asked for.
"""

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import ClassVar, cast, get_type_hints

from broker.placement.typed_request import decode
from config.bounds import CHANNEL_FRAME_BYTES, CHANNEL_REQUESTS_IN_FLIGHT
from magnetar.protocol.server_error import InternalError, MagnetarError, PeerError, ServerError
from magnetar.protocol.state_table import StateTable

CHANNEL_PATH = "/admin/v2/broker-channel"
"""Path of the WebSocket on the REST port of the broker that answers."""
CHANNEL_VERSION = 1
_TYPE = "type"
_SAME_VERSION = "run the same version of the broker everywhere."


class ChannelViolation(PeerError):
    """The other end sent a frame that breaks the protocol.  The connection is closed."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class ChannelRefused(PeerError):
    """The other end refused the connection, or this end refuses it: see the sentence."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ChannelStopping(PeerError):
    """This end stops and takes no new requests."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ChannelBusy(PeerError):
    """Too many requests are in flight at this end."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class FrameTooLarge(PeerError):
    """A request or an answer has more bytes than a frame may have."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class ChannelDefect(InternalError):
    """This end of the channel was used as its state does not allow."""


class ChannelState(enum.Enum):
    """The state of one end of a channel."""

    GREETING = "greeting"
    OPEN = "open"
    STOPPING = "stopping"
    """Requests in progress are answered and new ones refused; of the answering end only."""
    CLOSED = "closed"


CHANNEL_MOVES: StateTable[ChannelState] = StateTable(
    {
        ChannelState.GREETING: (ChannelState.OPEN, ChannelState.CLOSED),
        ChannelState.OPEN: (ChannelState.STOPPING, ChannelState.CLOSED),
        ChannelState.STOPPING: (ChannelState.CLOSED,),
        ChannelState.CLOSED: (),
    },
    defect=ChannelDefect,
)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of each end."""

    version: int
    broker_id: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last frame of an end that refuses the other one."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """A typed request: its kind, and its fields as JSON."""

    request_id: int
    kind: str
    fields: object


@dataclass(frozen=True, slots=True)
class Answer:
    """The JSON that a request returned."""

    request_id: int
    value: object


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that a request raised."""

    request_id: int
    reason: str
    code: int | None = None
    """Pulsar's number of the error; None for a defect of the broker that answers."""
    owner_id: str | None = None
    """Broker id of the owner that is to be asked instead, if the broker that answers knows it."""


@dataclass(frozen=True, slots=True)
class Event:
    """A message of the broker that answers to the broker that asks, without an answer."""

    kind: str
    value: object


Frame = Hello | Goodbye | RequestFrame | Answer | Refusal | Event

FRAME_TYPES: Mapping[str, type[Frame]] = MappingProxyType(
    {
        "HELLO": Hello,
        "GOODBYE": Goodbye,
        "REQUEST": RequestFrame,
        "ANSWER": Answer,
        "REFUSAL": Refusal,
        "EVENT": Event,
    }
)
_NAMES: Mapping[type[Frame], str] = MappingProxyType(
    {frame: name for name, frame in FRAME_TYPES.items()}
)
_HINTS: Mapping[type[Frame], Mapping[str, object]] = MappingProxyType(
    {frame: MappingProxyType(get_type_hints(frame)) for frame in _NAMES}
)


def write_frame(frame: Frame, max_bytes: int = CHANNEL_FRAME_BYTES) -> str:
    """Return the text of a frame, in ASCII.  Raises `FrameTooLarge`."""
    members = {each.name: getattr(frame, each.name) for each in fields(frame)}
    text = json.dumps({_TYPE: _NAMES[type(frame)], **members}, separators=(",", ":"))
    if len(text) > max_bytes:  # C5
        raise FrameTooLarge(
            f"{_NAMES[type(frame)]} has {len(text)} bytes and a frame between brokers may have "
            f"{max_bytes}: ask for less."
        )
    return text


def read_frame(text: str) -> Frame:
    """Return the frame that a text is.  Raises `ChannelViolation`."""
    try:
        members = json.loads(text)
    except ValueError as error:
        raise _violation(text, "is no JSON") from error
    frame = FRAME_TYPES.get(str(members.pop(_TYPE, None))) if isinstance(members, dict) else None
    if frame is None:
        raise _violation(text, "has no known type")
    hints = _HINTS[frame]
    if members.keys() != hints.keys():
        raise _violation(text, f"needs {', '.join(hints)}")
    try:
        values = {name: decode(hints[name], value) for name, value in members.items()}
    except (ValueError, MagnetarError) as error:
        raise _violation(text, str(error)) from error
    return cast("Callable[..., Frame]", frame)(**values)


def _violation(text: str, reason: str) -> ChannelViolation:
    return ChannelViolation(
        f"A frame of another broker {reason} ({text[:100]}): look at the log of that broker."
    )


class ChannelEnd:
    """The state of one end."""

    def __init__(
        self,
        broker_id: str,
        *,
        max_in_flight: int = CHANNEL_REQUESTS_IN_FLIGHT,
        max_frame_bytes: int = CHANNEL_FRAME_BYTES,
    ) -> None:
        self.state = ChannelState.GREETING
        self.peer_id = ""
        """Broker id of the other end, from its HELLO."""
        self.max_frame_bytes = max_frame_bytes
        self._broker_id = broker_id
        self._max_in_flight = max_in_flight
        self._in_flight: set[int] = set()
        self._last_id = 0

    @property
    def in_flight(self) -> int:
        """Number of requests without an answer."""
        return len(self._in_flight)

    def hello(self) -> str:
        """Return the HELLO of this end."""
        return write_frame(Hello(CHANNEL_VERSION, self._broker_id))

    def close(self) -> None:
        """Note that the connection is lost or closed.  May be called again."""
        if self.state is not ChannelState.CLOSED:
            self._move(ChannelState.CLOSED)
        self._in_flight.clear()

    def _greeted(self, frame: Frame) -> None:
        """Take the first frame of the other end.  Raises `ChannelRefused`, `ChannelViolation`."""
        if isinstance(frame, Goodbye):
            raise ChannelRefused(frame.reason)
        if not isinstance(frame, Hello):  # C1
            raise ChannelViolation(
                f"The first frame of another broker is {_NAMES[type(frame)]} and must be HELLO: "
                f"{_SAME_VERSION}"
            )
        if frame.version != CHANNEL_VERSION:  # C1
            raise ChannelRefused(
                f"{frame.broker_id} speaks version {frame.version} of the channel between brokers, "
                f"and {self._broker_id} version {CHANNEL_VERSION}: {_SAME_VERSION}"
            )
        self.peer_id = frame.broker_id
        self._move(ChannelState.OPEN)

    def _move(self, to: ChannelState) -> None:
        self.state = CHANNEL_MOVES.move(self.state, to, "The channel of {}", self._broker_id)


class AskingEnd(ChannelEnd):
    """The end that sends requests."""

    def ask(self, kind: str, fields: object) -> tuple[int, str]:
        """Return the id of a new request and its frame.

        Raises `ChannelBusy` and `FrameTooLarge`; `ChannelDefect` unless the channel is open.
        """
        if self.state is not ChannelState.OPEN:
            raise ChannelDefect(
                f"{kind} was sent over a channel that is {self.state.value}: report this as a "
                "defect."
            )
        if self.in_flight >= self._max_in_flight:  # C4
            raise ChannelBusy(f"{self.in_flight} requests wait for {self.peer_id}: try again.")
        request_id = self._last_id + 1
        text = write_frame(RequestFrame(request_id, kind, fields), self.max_frame_bytes)
        self._last_id = request_id
        self._in_flight.add(request_id)
        return request_id, text

    def give_up(self, request_id: int) -> None:
        """Note that nobody waits for the answer any more."""
        self._in_flight.discard(request_id)

    def receive(self, text: str) -> Answer | Refusal | Event | None:
        """Return an answer or an event, None for HELLO and the answer to what was given up.

        Raises `ChannelViolation`, `ChannelRefused`.
        """
        frame = read_frame(text)
        if self.state is ChannelState.GREETING:
            self._greeted(frame)
            return None
        if isinstance(frame, Goodbye):
            raise ChannelRefused(frame.reason)
        if isinstance(frame, Event):
            return frame
        if not isinstance(frame, Answer | Refusal) or not 0 < frame.request_id <= self._last_id:
            raise _violation(text, "answers no request")  # C3
        if frame.request_id not in self._in_flight:
            return None
        self._in_flight.remove(frame.request_id)
        return frame


class AnsweringEnd(ChannelEnd):
    """The end that carries requests out."""

    def receive(self, text: str) -> RequestFrame | Refusal | None:
        """Return a request to carry out, or the refusal to send; None for HELLO, or if closed.

        Raises `ChannelViolation`, `ChannelRefused`.
        """
        frame = read_frame(text)
        if self.state is ChannelState.GREETING:
            self._greeted(frame)
            return None
        if self.state is ChannelState.CLOSED:
            return None
        if not isinstance(frame, RequestFrame) or frame.request_id <= self._last_id:
            raise _violation(text, "is no new request")  # C3
        self._last_id = frame.request_id
        if self.state is ChannelState.STOPPING:  # C6
            return refusal_of(
                frame.request_id,
                ChannelStopping(f"{self._broker_id} stops: look up who serves it, and ask again."),
            )
        if self.in_flight >= self._max_in_flight:  # C4
            return refusal_of(
                frame.request_id,
                ChannelBusy(
                    f"{self._broker_id} works on {self.in_flight} requests of {self.peer_id}: ask "
                    "again."
                ),
            )
        self._in_flight.add(frame.request_id)
        return frame

    def answer(self, frame: Answer | Refusal) -> str | None:
        """Return the text of an answer (C2), None if the connection has been lost.

        An answer that is too large becomes a refusal (C5).  The request counts as in flight until
        `sent`, so that a peer that reads nothing gets no more work done.
        """
        return self._text_of(frame) if frame.request_id in self._in_flight else None

    def sent(self, request_id: int) -> None:
        """Note that the answer to a request has been sent."""
        self._in_flight.discard(request_id)

    def refuse(self, refusal: Refusal) -> str:
        """Return the text of a refusal of a request that was not taken."""
        return self._text_of(refusal)

    def event(self, kind: str, value: object) -> str:
        """Return the text of an event.  Raises `FrameTooLarge`."""
        return write_frame(Event(kind, value), self.max_frame_bytes)

    def stop(self) -> None:
        """Refuse new requests from now on.  May be called again."""
        if self.state is ChannelState.OPEN:
            self._move(ChannelState.STOPPING)

    def _text_of(self, frame: Answer | Refusal) -> str:
        try:
            return write_frame(frame, self.max_frame_bytes)
        except FrameTooLarge as error:
            return write_frame(refusal_of(frame.request_id, error))


def goodbye_of(error: ChannelRefused | ChannelViolation) -> str:
    """Return the GOODBYE with the reason of an error."""
    return write_frame(Goodbye(str(error)))


def refusal_of(request_id: int, error: MagnetarError) -> Refusal:
    """Return the refusal that carries an error, by its code."""
    owner_id = cast("object", getattr(error, "owner_id", None))
    return Refusal(
        request_id,
        str(error),
        int(error.code),
        owner_id if isinstance(owner_id, str) and owner_id else None,
    )
