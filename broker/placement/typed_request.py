"""Pure: typed requests between brokers, and their JSON."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from types import MappingProxyType, NoneType, UnionType
from typing import (
    ClassVar,
    Generic,
    Never,
    Protocol,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name, segment_name
from magnetar.protocol.server_error import InternalError, MagnetarError, PeerError, ServerError

A_co = TypeVar("A_co", covariant=True)
H_contra = TypeVar("H_contra", contravariant=True)
R = TypeVar("R", bound="Request[Never, object]")

# Any other position means something on the broker of its ledger only.
_POSITIONS: Mapping[str, Position] = MappingProxyType({"earliest": EARLIEST, "latest": LATEST})
_POSITION_NAMES: Mapping[Position, str] = MappingProxyType(
    {position: name for name, position in _POSITIONS.items()}
)


class PositionOfOneBroker(InternalError):
    """A position other than EARLIEST and LATEST was to be sent to another broker."""


class MalformedRequest(PeerError):
    """A request or an answer of another broker is of an unknown kind, or its JSON is malformed."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class EventSink(Protocol):
    """Interface: the connection to the broker that sent a request, for the code that serves it."""

    def send_event(self, kind: str, value: object) -> None:
        """Send JSON after what was sent before, without waiting.

        The connection is closed when too many events wait.  One that is closed sends nothing.
        """
        ...

    def on_close(self, listener: Callable[[], None]) -> None:
        """Call `listener` once the connection is closed or lost: at once if it is already."""
        ...


RequestHandler = Callable[[EventSink, object], Awaitable[object]]
"""Takes the JSON of a request's fields and returns that of its answer.  Raises `MagnetarError`."""


@runtime_checkable
class Jsonable(Protocol):
    """A value that writes its own JSON.  Its type has a classmethod `from_json`."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that is sent to another broker."""
        ...


@dataclass(frozen=True, slots=True)
class Request(ABC, Generic[H_contra, A_co]):
    """A request that one broker sends to another as the JSON of its annotated fields.

    KIND is its name between brokers, unique among all requests.  `H_contra` is the object that
    carries it out, and `A_co`, the annotated return type of `run`, the type of its answer.  Fields
    and answers are of the types that `decode` knows.

    A field whose default is a value may be absent, and is sent only if it differs.  So a field that
    is added with a default keeps the request readable by brokers of the version before.
    """

    KIND: ClassVar[str]

    @abstractmethod
    async def run(self, host: H_contra) -> A_co:
        """Carry it out here."""

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read the fields.  Raises `MalformedRequest`."""
        hints, names = get_type_hints(cls), [each.name for each in fields(cls)]
        needed = {each.name for each in fields(cls) if each.default is MISSING}
        if not isinstance(value, dict) or not needed <= value.keys() <= set(names):
            raise MalformedRequest(f"{value!r} is no {cls.KIND}: it needs {', '.join(names)}.")
        given = [name for name in names if name in value]
        return cls(**{name: _decoded(hints[name], value[name], cls.KIND) for name in given})

    def to_json(self) -> dict[str, object]:
        """Return the fields.  Raises `PositionOfOneBroker`."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        defaults = {each.name: each.default for each in fields(self)}
        return {name: encode(value) for name, value in given.items() if value != defaults[name]}

    def answer_from_json(self, value: object) -> A_co:
        """Read what another broker answered.  Raises `MalformedRequest`."""
        hint = get_type_hints(type(self).run)["return"]
        return cast("A_co", _decoded(hint, value, f"the answer to {self.KIND}"))


def request_handlers(
    table: Mapping[str, type[R]], carry_out: Callable[[EventSink, R], Awaitable[object]]
) -> Mapping[str, RequestHandler]:
    """Return a handler for each kind of request of a table, which `carry_out` carries out."""

    def handler_of(request_type: type[R]) -> RequestHandler:
        async def handle(sink: EventSink, fields: object) -> object:
            return encode(await carry_out(sink, request_type.from_json(fields)))

        return handle

    return {kind: handler_of(request_type) for kind, request_type in table.items()}


def encode(value: object) -> object:
    """Return the JSON of a field or an answer.  Raises `PositionOfOneBroker`."""
    if isinstance(value, Position):
        name = _POSITION_NAMES.get(value)
        if name is None:
            raise PositionOfOneBroker(
                f"{value} cannot be asked of another broker: give EARLIEST or LATEST, or a time."
            )
        return name
    if isinstance(value, SegmentName | TopicName):
        return segment_json(value) if isinstance(value, SegmentName) else str(value)
    if isinstance(value, Jsonable):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): encode(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(each) for each in value]
    return value


def decode(hint: object, value: object) -> object:
    """Return the value of the annotated type `hint` that JSON stands for.

    It knows text, numbers, booleans, None, unions of a type with None, EARLIEST and LATEST, names
    of topics and segments, mappings, sequences, `object` for any JSON, and types with `from_json`.
    Raises ValueError, KeyError, `InvalidTopicName`.
    """
    if isinstance(hint, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        return decode(next(each for each in get_args(hint) if each is not NoneType), value)
    if hint is Position and isinstance(value, str) and value in _POSITIONS:
        return _POSITIONS[value]
    if hint in (SegmentName, TopicName) and isinstance(value, str | dict):
        return segment_in(value) if hint is SegmentName else parse_topic_name(str(value))
    if hint is object or hint is type(value):
        return value
    return _composed(hint, value)


def segment_json(segment: SegmentName) -> str | dict[str, str]:
    """Return the JSON of a segment's name: its text, with the legacy topic if it has one."""
    if segment.legacy_topic is None:
        return str(segment)
    text = str(replace(segment, legacy_topic=None))
    return {"segment": text, "legacyTopic": str(segment.legacy_topic)}


def segment_in(value: object) -> SegmentName:
    """Return the segment that JSON names.  Raises ValueError, KeyError, `InvalidTopicName`."""
    if isinstance(value, str):
        return segment_name(parse_topic_name(value))
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no name of a segment")
    segment = segment_name(parse_topic_name(str(value["segment"])))
    return replace(segment, legacy_topic=parse_topic_name(str(value["legacyTopic"])))


def _composed(hint: object, value: object) -> object:
    origin = get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        of_value = get_args(hint)[1]
        return {str(key): decode(of_value, each) for key, each in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence) and isinstance(value, list):
        return [decode(get_args(hint)[0], each) for each in value]
    from_json = getattr(hint, "from_json", None)
    if from_json is None:
        raise ValueError(f"{value!r} is no {hint}")
    return cast("object", from_json(value))


def _decoded(hint: object, value: object, what: str) -> object:
    try:
        return decode(hint, value)
    except (ValueError, KeyError, MagnetarError) as error:
        raise MalformedRequest(
            f"{what} is malformed ({error}): look at the log of the broker that sent it."
        ) from error
