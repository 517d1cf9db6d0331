"""The access rule of every command: who may send it, and how it is refused.

One table, `RULES`.  A command without an entry cannot be served: `guarded` refuses a table of
handlers that has one.  `docs/access.md` is printed from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from broker.scalable.answers import dag_error, subscribe_error, topics_error
from broker.topics.reserved_names import names_coordinators
from broker.topics.subscription_positions import require_few
from broker.wire.connection import Connection
from broker.wire.handlers.transactions import require_partition_count
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.names import parse_namespace_name, parse_topic_name
from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.server_error import MagnetarError
from security.access import Access, Need, on_namespace, on_topic

Questions = Sequence[Access]
Opened = tuple[int, int]
"""The type of a command that opens something that lasts, and the peer's id of that."""
_SUPERUSER: Final = (Access(Need.SUPERUSER),)


class _Answer(Protocol):
    """Refuses a command with its own answer."""

    def __call__(self, command: BaseCommand, error: MagnetarError) -> BaseCommand: ...


@dataclass(frozen=True, slots=True)
class CommandRule:
    """The rule of one command.

    `described` is for the page of documentation.
    """

    described: str
    questions: Callable[[BaseCommand], Questions] | None = None
    """Returns all that must be allowed; raises `MagnetarError` for a name that is none.  None: the
    command is for every connection that has authenticated."""
    answer: _Answer | None = None
    """Builds the refusal; None: ERROR with the request id."""
    lasting: str | None = None
    """The field that identifies what the command opens: that ends if the access is withdrawn."""
    closes: tuple[int, str] | None = None
    """For a command that closes something: the type that opened it, and the field with its id."""

    def refuse(self, connection: Connection, command: BaseCommand, error: MagnetarError) -> None:
        """Send the refusal."""
        if self.answer is not None:
            connection.send(self.answer(command, error))
            return
        request_id = getattr(_fields(command), "request_id", None)
        if request_id is None:
            connection.close(str(error))
        else:
            connection.reply_error(request_id, error)

    def opened(self, command: BaseCommand) -> Opened | None:
        """What the command opens, as a key; None if it opens nothing that lasts."""
        if self.lasting is None:
            return None
        return command.type, getattr(_fields(command), self.lasting)

    def closed(self, command: BaseCommand) -> Opened | None:
        """What the command closes, as `opened` named it; None if it closes nothing."""
        if self.closes is None:
            return None
        kind, field = self.closes
        return kind, getattr(_fields(command), field)


class _Fields(Protocol):
    """Fields of commands that the rules read."""

    request_id: int
    topic: str
    namespace: str
    subscription: str


def _fields(command: BaseCommand) -> _Fields:
    return cast("_Fields", getattr(command, FIELD_OF_TYPE[command.type]))


def _code(error: MagnetarError) -> pb.ServerError:
    return cast("pb.ServerError", int(error.code))


# Questions


def _topic(need: Need) -> Callable[[BaseCommand], Questions]:
    return lambda command: (on_topic(need, parse_topic_name(_fields(command).topic)),)


def _looked_up_topic(command: BaseCommand) -> Questions:
    topic = parse_topic_name(_fields(command).topic)
    # Every role may use transactions, and v4 clients find their coordinators by this name.
    return () if names_coordinators(topic) else (on_topic(Need.LOOKUP, topic),)


def _subscription(command: BaseCommand) -> Questions:
    fields = _fields(command)
    return (on_topic(Need.CONSUME, parse_topic_name(fields.topic), fields.subscription),)


def _told_positions(command: BaseCommand) -> Questions:
    request = command.subscription_positions
    require_few(request)
    topic = parse_topic_name(request.topic)
    names = dict.fromkeys(each.subscription for each in request.subscriptions)
    consume = (on_topic(Need.CONSUME, topic, name) for name in names)
    return (on_topic(Need.PRODUCE, topic), *consume)


def _namespace(command: BaseCommand) -> Questions:
    return (on_namespace(Need.LOOKUP, parse_namespace_name(_fields(command).namespace)),)


def _producer(command: BaseCommand) -> Questions:
    request = command.producer
    topic = parse_topic_name(request.topic)
    produce = on_topic(Need.PRODUCE, topic)
    if not request.initial_subscription_name:
        return (produce,)
    return (produce, on_topic(Need.CONSUME, topic, request.initial_subscription_name))


def _partitions(command: BaseCommand) -> Questions:
    # Counted first: parsing a hundred thousand names would hold up everybody.
    require_partition_count(len(command.add_partition_to_txn.partitions))
    names = dict.fromkeys(command.add_partition_to_txn.partitions)
    asked = dict.fromkeys(on_topic(Need.PRODUCE, parse_topic_name(name)) for name in names)
    return tuple(asked)


def _subscriptions(command: BaseCommand) -> Questions:
    require_partition_count(len(command.add_subscription_to_txn.subscription))
    asked = dict.fromkeys(
        on_topic(Need.CONSUME, parse_topic_name(each.topic), each.subscription)
        for each in command.add_subscription_to_txn.subscription
    )
    return tuple(asked)


# Answers


def _lookup(command: BaseCommand, error: MagnetarError) -> BaseCommand:
    response = pb.CommandLookupTopicResponse(
        request_id=command.lookup.request_id,
        response=pb.CommandLookupTopicResponse.Failed,
        error=_code(error),
        message=str(error),
    )
    return BaseCommand(type=BaseCommand.LOOKUP_RESPONSE, lookup_response=response)


def _partitioned_metadata(command: BaseCommand, error: MagnetarError) -> BaseCommand:
    response = pb.CommandPartitionedTopicMetadataResponse(
        request_id=command.partitioned_metadata.request_id,
        response=pb.CommandPartitionedTopicMetadataResponse.Failed,
        error=_code(error),
        message=str(error),
    )
    return BaseCommand(
        type=BaseCommand.PARTITIONED_METADATA_RESPONSE, partitioned_metadata_response=response
    )


class _Response(Protocol):
    """An answer that can carry an error."""

    request_id: int
    error: pb.ServerError
    message: str
    error_code: pb.ServerError
    error_message: str


def _own_response(kind: BaseCommand.Type) -> _Answer:
    """The answer of that type, with the error in it."""

    def build(command: BaseCommand, error: MagnetarError) -> BaseCommand:
        answer = BaseCommand(type=kind)
        message = getattr(answer, FIELD_OF_TYPE[kind])
        response = cast("_Response", message)
        response.request_id = _fields(command).request_id
        if "error_code" in message.DESCRIPTOR.fields_by_name:
            response.error_code, response.error_message = _code(error), str(error)
        else:
            response.error, response.message = _code(error), str(error)
        return answer

    return build


def _in_transaction(kind: BaseCommand.Type) -> _Answer:
    """The answer of that type with the error and the transaction, or with the coordinator."""

    def build(command: BaseCommand, error: MagnetarError) -> BaseCommand:
        answer = _own_response(kind)(command, error)
        request = getattr(command, FIELD_OF_TYPE[command.type])
        response = getattr(answer, FIELD_OF_TYPE[kind])
        response.txnid_most_bits = request.txnid_most_bits
        response.txnid_least_bits = request.txnid_least_bits
        return answer

    return build


_ANYBODY: Final = CommandRule("anybody")
_AUTHENTICATED: Final = CommandRule("any role")
_HOLDER: Final = CommandRule("the connection that opened it")


def _closing(kind: int, field: str) -> CommandRule:
    return CommandRule(_HOLDER.described, closes=(kind, field))


_OWNER: Final = CommandRule("any role; the transaction, or the key, must be its own")

RULES: Final[Mapping[int, CommandRule]] = {
    BaseCommand.CONNECT: _ANYBODY,
    # Nothing but CONNECT is served before CONNECTED.
    BaseCommand.PING: _AUTHENTICATED,
    BaseCommand.PONG: _AUTHENTICATED,
    BaseCommand.AUTH_RESPONSE: CommandRule("any role, asked by AUTH_CHALLENGE"),
    # Ids that this connection was given by PRODUCER, SUBSCRIBE and the like.
    BaseCommand.ACK: CommandRule(
        "the connection that opened it; a transaction must be the role's own"
    ),
    BaseCommand.FLOW: _HOLDER,
    BaseCommand.UNSUBSCRIBE: _HOLDER,
    BaseCommand.CLOSE_PRODUCER: _closing(BaseCommand.PRODUCER, "producer_id"),
    BaseCommand.CLOSE_CONSUMER: _closing(BaseCommand.SUBSCRIBE, "consumer_id"),
    BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES: _HOLDER,
    BaseCommand.CONSUMER_STATS: _HOLDER,
    BaseCommand.SEEK: _HOLDER,
    BaseCommand.GET_LAST_MESSAGE_ID: _HOLDER,
    BaseCommand.WATCH_TOPIC_LIST_CLOSE: _closing(BaseCommand.WATCH_TOPIC_LIST, "watcher_id"),
    BaseCommand.SCALABLE_TOPIC_CLOSE: _closing(BaseCommand.SCALABLE_TOPIC_LOOKUP, "session_id"),
    BaseCommand.SCALABLE_TOPIC_UNSUBSCRIBE: _HOLDER,
    BaseCommand.WATCH_SCALABLE_TOPICS_CLOSE: _closing(
        BaseCommand.WATCH_SCALABLE_TOPICS, "watch_id"
    ),
    BaseCommand.WATCH_TC_ASSIGNMENTS_CLOSE: _HOLDER,
    # Topics
    BaseCommand.LOOKUP: CommandRule(
        "produce or consume on the topic; any role for coordinators", _looked_up_topic, _lookup
    ),
    BaseCommand.PARTITIONED_METADATA: CommandRule(
        "produce or consume on the topic; any role for coordinators",
        _looked_up_topic,
        _partitioned_metadata,
    ),
    BaseCommand.PRODUCER: CommandRule(
        "produce on the topic; consume too for a first subscription",
        _producer,
        lasting="producer_id",
    ),
    BaseCommand.SUBSCRIBE: CommandRule(
        "consume on the topic by the subscription", _subscription, lasting="consumer_id"
    ),
    BaseCommand.GET_SCHEMA: CommandRule(
        "produce or consume on the topic",
        _topic(Need.LOOKUP),
        _own_response(BaseCommand.GET_SCHEMA_RESPONSE),
    ),
    BaseCommand.GET_OR_CREATE_SCHEMA: CommandRule(
        "produce on the topic",
        _topic(Need.PRODUCE),
        _own_response(BaseCommand.GET_OR_CREATE_SCHEMA_RESPONSE),
    ),
    BaseCommand.PLAN_RANGE: CommandRule(
        "consume on the topic by any subscription",
        _topic(Need.READ_ALL),
        _own_response(BaseCommand.PLAN_RANGE_RESPONSE),
    ),
    BaseCommand.READ_ENTRIES: CommandRule(
        "consume on the topic by any subscription",
        _topic(Need.READ_ALL),
        _own_response(BaseCommand.READ_ENTRIES_RESPONSE),
    ),
    # Scalable topics
    BaseCommand.SCALABLE_TOPIC_LOOKUP: CommandRule(
        "produce or consume on the topic",
        _topic(Need.LOOKUP),
        lambda command, error: dag_error(command.scalable_topic_lookup.session_id, error),
        lasting="session_id",
    ),
    BaseCommand.SCALABLE_TOPIC_SUBSCRIBE: CommandRule(
        "consume on the topic by the subscription",
        _subscription,
        lambda command, error: subscribe_error(command.scalable_topic_subscribe.request_id, error),
        lasting="consumer_id",
    ),
    BaseCommand.SUBSCRIPTION_POSITIONS: CommandRule(
        "produce on the topic, and consume on it by the subscriptions",
        _told_positions,
    ),
    # Namespaces
    BaseCommand.GET_TOPICS_OF_NAMESPACE: CommandRule(
        "produce or consume on the namespace", _namespace
    ),
    BaseCommand.WATCH_TOPIC_LIST: CommandRule(
        "produce or consume on the namespace", _namespace, lasting="watcher_id"
    ),
    BaseCommand.WATCH_SCALABLE_TOPICS: CommandRule(
        "produce or consume on the namespace",
        _namespace,
        lambda command, error: topics_error(command.watch_scalable_topics.watch_id, error),
        lasting="watch_id",
    ),
    # Transactions
    BaseCommand.WATCH_TC_ASSIGNMENTS: _AUTHENTICATED,
    BaseCommand.TC_CLIENT_CONNECT_REQUEST: _AUTHENTICATED,
    BaseCommand.NEW_TXN: _AUTHENTICATED,
    BaseCommand.ADD_PARTITION_TO_TXN: CommandRule(
        "the transaction's owner, with produce on the topics",
        _partitions,
        _in_transaction(BaseCommand.ADD_PARTITION_TO_TXN_RESPONSE),
    ),
    BaseCommand.ADD_SUBSCRIPTION_TO_TXN: CommandRule(
        "the transaction's owner, with consume on the topics by the subscriptions",
        _subscriptions,
        _in_transaction(BaseCommand.ADD_SUBSCRIPTION_TO_TXN_RESPONSE),
    ),
    BaseCommand.END_TXN: _OWNER,
    BaseCommand.END_TXN_ON_PARTITION: CommandRule(
        "a superuser",
        lambda _: _SUPERUSER,
        _in_transaction(BaseCommand.END_TXN_ON_PARTITION_RESPONSE),
    ),
    BaseCommand.END_TXN_ON_SUBSCRIPTION: CommandRule(
        "a superuser",
        lambda _: _SUPERUSER,
        _in_transaction(BaseCommand.END_TXN_ON_SUBSCRIPTION_RESPONSE),
    ),
    # Transaction keys: a key's name has its owner in it, so that no other role can name it.
    BaseCommand.OPEN_TRANSACTION_KEY: _OWNER,
    BaseCommand.ATTACH_TRANSACTION_KEY: _OWNER,
    BaseCommand.BEGIN_ATTEMPT: _OWNER,
    BaseCommand.COMMIT_GROUP: _OWNER,
    BaseCommand.ABORT_GROUP: _OWNER,
    BaseCommand.EXTEND_GROUP: _OWNER,
}
