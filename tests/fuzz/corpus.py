"""Well-formed commands of every type, about things that an attacking session has open.

Rules: ids and names are those of `OPENING`, so that what a mutation leaves alone still means
something to the broker.  Commands that nobody wrote out here are made of their required fields.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.message import build_batch, build_entry
from tests.support.raw_client import basecommand

Kind = pb.BaseCommand
TOPICS: Final = [f"persistent://public/default/attacked-{number}" for number in range(3)]
SCALABLE: Final = "topic://public/default/attacked"
SEGMENTS: Final = [
    "segment://public/default/attacked/0000-7fff-0",
    "segment://public/default/attacked/8000-ffff-1",
]
NAMES: Final = [*TOPICS, SCALABLE, *SEGMENTS]
PRODUCERS: Final = (1, 2)
CONSUMERS: Final = (3, 4, 5)
SESSION: Final = 6
SENDERS: Final = 20
"""Added to the id of a segment of another cluster, it is the id of its sender's producer."""
SOURCE: Final = "fuzz-cluster"
ORDERED: Final = 7
WATCH: Final = 8
TRANSACTIONS: Final = 3000
"""Those of the first coordinator that are begun before the attack."""
ENDING: Final = frozenset(
    {
        *(
            Kind.CONNECT,
            Kind.AUTH_RESPONSE,
            Kind.CONNECTED,
            Kind.SEND_RECEIPT,
            Kind.SEND_ERROR,
            Kind.MESSAGE,
            Kind.SUCCESS,
        ),
        *(Kind.ERROR, Kind.PRODUCER_SUCCESS, Kind.ACTIVE_CONSUMER_CHANGE, Kind.AUTH_CHALLENGE),
        *(Kind.REACHED_END_OF_TOPIC, Kind.TOPIC_MIGRATED),
        *(number for number, name in FIELD_OF_TYPE.items() if name.endswith("_response")),
        *(number for number, name in FIELD_OF_TYPE.items() if name.endswith("_update")),
    }
)
"""Commands that end a connection: those that only a broker sends, and a second CONNECT."""


def connect() -> pb.BaseCommand:
    """CONNECT, as a client after 5.0.0-M1."""
    command = pb.CommandConnect(client_version="fuzz", protocol_version=21)
    command.feature_flags.supports_topic_watchers = True
    return basecommand(Kind.CONNECT, command)


def opening() -> list[pb.BaseCommand]:
    """What a session opens after CONNECT; each of these has one answer."""
    commands: list[tuple[pb.BaseCommand.Type, Message]] = [
        (Kind.PRODUCER, pb.CommandProducer(topic=TOPICS[0], producer_id=1, request_id=101)),
        (Kind.PRODUCER, pb.CommandProducer(topic=SEGMENTS[0], producer_id=2, request_id=102)),
    ]
    kinds = (pb.CommandSubscribe.Shared, pb.CommandSubscribe.Key_Shared, pb.CommandSubscribe.Shared)
    places = zip(CONSUMERS, kinds, (TOPICS[0], TOPICS[1], SEGMENTS[0]), strict=True)
    for consumer_id, kind, topic in places:
        subscribe = pb.CommandSubscribe(
            topic=topic,
            subscription=f"attack-{consumer_id}",
            sub_type=kind,
            consumer_id=consumer_id,
            request_id=100 + consumer_id,
            initial_position=pb.CommandSubscribe.Earliest,
        )
        commands.append((Kind.SUBSCRIBE, subscribe))
    lookup = pb.CommandScalableTopicLookup(session_id=SESSION, topic=SCALABLE)
    commands.append((Kind.SCALABLE_TOPIC_LOOKUP, lookup))
    return [basecommand(kind, command) for kind, command in commands]


def requests() -> list[pb.BaseCommand]:
    """One command of every type, and several of those that have many faces."""
    written = [
        *opening(),
        *_for_consumers(),
        *_for_others(),
        *_about_names(),
        *in_transactions(),
    ]
    there = {command.type for command in written}
    return [*written, *(filled(kind) for kind in FIELD_OF_TYPE if kind not in there)]


def _for_consumers() -> Iterable[pb.BaseCommand]:
    place = pb.MessageIdData(ledger_id=3, entry_id=5, batch_index=1, batch_size=4, ack_set=[13])
    plain = pb.MessageIdData(ledger_id=3, entry_id=6)
    ack, flow = pb.CommandAck, pb.CommandFlow
    commands: list[tuple[pb.BaseCommand.Type, Message]] = [
        (Kind.ACK, ack(consumer_id=3, ack_type=ack.Individual, message_id=[place, plain])),
        (Kind.ACK, ack(consumer_id=4, ack_type=ack.Individual, message_id=[plain], request_id=9)),
        (Kind.ACK, ack(consumer_id=5, ack_type=ack.Cumulative, message_id=[place])),
        (Kind.FLOW, flow(consumer_id=3, message_permits=100)),
        (Kind.FLOW, flow(consumer_id=4, message_permits=10)),
        (
            Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES,
            pb.CommandRedeliverUnacknowledgedMessages(consumer_id=3, message_ids=[plain]),
        ),
        (Kind.SEEK, pb.CommandSeek(consumer_id=4, request_id=10, message_id=plain)),
        (Kind.SEEK, pb.CommandSeek(consumer_id=5, request_id=11, message_publish_time=1)),
        (Kind.GET_LAST_MESSAGE_ID, pb.CommandGetLastMessageId(consumer_id=3, request_id=12)),
        (Kind.CONSUMER_STATS, pb.CommandConsumerStats(consumer_id=3, request_id=13)),
        (Kind.UNSUBSCRIBE, pb.CommandUnsubscribe(consumer_id=5, request_id=14)),
        (Kind.CLOSE_CONSUMER, pb.CommandCloseConsumer(consumer_id=4, request_id=16)),
    ]
    return [basecommand(kind, command) for kind, command in commands]


def _for_others() -> Iterable[pb.BaseCommand]:
    commands: list[tuple[pb.BaseCommand.Type, Message]] = [
        *(
            (Kind.PRODUCER, _sender(segment_id, request_id))
            for segment_id, request_id in ((3, 22), (4, 23))
        ),
        *(
            (Kind.SEND, pb.CommandSend(producer_id=SENDERS + segment_id, sequence_id=number))
            for segment_id in (3, 4)
            for number in (0, 1)
        ),
        (Kind.SEND, pb.CommandSend(producer_id=1, sequence_id=1)),
        (Kind.SEND, pb.CommandSend(producer_id=2, sequence_id=2, num_messages=3)),
        (Kind.SEND, pb.CommandSend(producer_id=1, sequence_id=3, is_chunk=True)),
        (Kind.CLOSE_PRODUCER, pb.CommandCloseProducer(producer_id=2, request_id=15)),
        (Kind.SCALABLE_TOPIC_CLOSE, pb.CommandScalableTopicClose(session_id=SESSION)),
        (
            Kind.SCALABLE_TOPIC_SUBSCRIBE,
            pb.CommandScalableTopicSubscribe(
                request_id=17,
                topic=SCALABLE,
                subscription="ordered",
                consumer_name="attacker",
                consumer_id=ORDERED,
                consumer_type=pb.STREAM,
            ),
        ),
        (
            Kind.SCALABLE_TOPIC_UNSUBSCRIBE,
            pb.CommandScalableTopicUnsubscribe(request_id=18, consumer_id=ORDERED),
        ),
        (
            Kind.WATCH_SCALABLE_TOPICS,
            pb.CommandWatchScalableTopics(watch_id=WATCH, namespace="public/default"),
        ),
        (
            Kind.WATCH_TOPIC_LIST,
            pb.CommandWatchTopicList(
                request_id=19, watcher_id=WATCH, namespace="public/default", topics_pattern=".*"
            ),
        ),
        (
            Kind.GET_TOPICS_OF_NAMESPACE,
            pb.CommandGetTopicsOfNamespace(request_id=20, namespace="public/default"),
        ),
        (
            Kind.GET_OR_CREATE_SCHEMA,
            pb.CommandGetOrCreateSchema(
                request_id=21,
                topic=TOPICS[2],
                schema=pb.Schema(name="s", schema_data=b"", type=pb.Schema.String),
            ),
        ),
    ]
    return [basecommand(kind, command) for kind, command in commands]


def _sender(segment_id: int, request_id: int) -> pb.CommandProducer:
    """The sender of a segment of another cluster, which attaches to the first segment here."""
    state = pb.SourceState(
        incarnation=7,
        segment_id=segment_id,
        owner_epoch=1,
        layout_epoch=1,
        segments=[2, 3, 4],
        ancestors=[2],
        ledger_id=-1,
        entry_id=-1,
    )
    return pb.CommandProducer(
        topic=SEGMENTS[0],
        producer_id=SENDERS + segment_id,
        request_id=request_id,
        producer_name=f"pulsar.repl.{SOURCE}.{segment_id}",
        user_provided_producer_name=True,
        source_state=state,
    )


def _about_names() -> Iterable[pb.BaseCommand]:
    commands: list[tuple[pb.BaseCommand.Type, Message]] = []
    for number, name in enumerate(NAMES, 30):
        commands += [
            (Kind.LOOKUP, pb.CommandLookupTopic(topic=name, request_id=number)),
            (
                Kind.PARTITIONED_METADATA,
                pb.CommandPartitionedTopicMetadata(topic=name, request_id=number + 10),
            ),
            (Kind.GET_SCHEMA, pb.CommandGetSchema(request_id=number + 20, topic=name)),
        ]
    return [basecommand(kind, command) for kind, command in commands]


def in_transactions() -> Iterable[pb.BaseCommand]:
    """Of a transaction of the first coordinator; `Fuzzer` puts in which."""
    plain = pb.MessageIdData(ledger_id=1, entry_id=6)
    place = pb.MessageIdData(ledger_id=2, entry_id=5, batch_index=1, batch_size=4, ack_set=[13])
    commands: list[tuple[pb.BaseCommand.Type, Message]] = [
        (Kind.WATCH_TC_ASSIGNMENTS, pb.CommandWatchTcAssignments(watch_id=WATCH)),
        (
            Kind.TC_CLIENT_CONNECT_REQUEST,
            pb.CommandTcClientConnectRequest(request_id=22, tc_id=0, scalable=True),
        ),
        (
            Kind.NEW_TXN,
            pb.CommandNewTxn(request_id=23, tc_id=0, txn_ttl_millis=20_000, scalable=True),
        ),
    ]
    txn: dict[str, Any] = {"txnid_most_bits": 0, "txnid_least_bits": 0}
    added = pb.CommandAddPartitionToTxn(request_id=24, partitions=NAMES, scalable=True, **txn)
    subscribed = pb.CommandAddSubscriptionToTxn(request_id=25, scalable=True, **txn)
    subscribed.subscription.add(topic=TOPICS[0], subscription="attack-3")
    commands += [
        (Kind.ADD_PARTITION_TO_TXN, added),
        (Kind.ADD_SUBSCRIPTION_TO_TXN, subscribed),
        (Kind.SEND, pb.CommandSend(producer_id=1, sequence_id=4, **txn)),
        (Kind.SEND, pb.CommandSend(producer_id=2, sequence_id=5, **txn)),
        *(
            (
                Kind.ACK,
                pb.CommandAck(
                    consumer_id=consumer_id,
                    ack_type=pb.CommandAck.Individual,
                    message_id=[each],
                    request_id=26,
                    **txn,
                ),
            )
            for consumer_id, each in ((3, place), (4, plain), (5, plain))
        ),
        *(
            (
                Kind.END_TXN,
                pb.CommandEndTxn(request_id=27, txn_action=action, scalable=True, **txn),
            )
            for action in (pb.COMMIT, pb.ABORT)
        ),
    ]
    return [basecommand(kind, command) for kind, command in commands]


def filled(kind: int) -> pb.BaseCommand:
    """A command of the type with its required fields set to something."""
    command = pb.BaseCommand(type=pb.BaseCommand.Type.Name(kind))
    body: Message = getattr(command, FIELD_OF_TYPE[kind])
    body.SetInParent()
    fill(body)
    return command


def fill(message: Message) -> None:
    """Set every required field, deeply."""
    for field in cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields):
        if not field.is_required:
            continue
        if field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            fill(part)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            text = field.type == FieldDescriptor.TYPE_STRING
            setattr(message, field.name, NAMES[0] if text else b"x")
        elif field.enum_type is not None:
            setattr(message, field.name, field.enum_type.values[0].number)
        else:
            setattr(message, field.name, 1)


def entry(rng: random.Random, send: pb.CommandSend) -> bytes:
    """An entry whose checksum is right and whose metadata is well-formed and often untrue."""
    metadata = pb.MessageMetadata(
        producer_name="fuzz", sequence_id=rng.randrange(4), publish_time=rng.randrange(4)
    )
    payload = rng.randbytes(rng.randrange(40))
    if send.HasField("txnid_least_bits") and rng.randrange(8):
        metadata.txnid_most_bits = send.txnid_most_bits
        metadata.txnid_least_bits = send.txnid_least_bits
    shape = rng.randrange(7)
    if shape == 0:
        metadata.num_messages_in_batch = rng.choice([0, -1, 1, 3, 2**31 - 1])
        single = pb.SingleMessageMetadata(payload_size=0, partition_key="k")
        payload = build_batch([(single, b"a"), (single, b"b"), (single, b"")])
    elif shape == 1:
        metadata.partition_key = "not base64!"
        metadata.partition_key_b64_encoded = True
    elif shape == 2:
        metadata.num_chunks_from_msg = rng.choice([0, 2, -3])
        metadata.chunk_id = rng.choice([0, 1, -1, 2**31 - 1])
        metadata.uuid = "u"
        metadata.total_chunk_msg_size = -1
    elif shape == 3:
        metadata.marker_type = rng.randrange(30)
        metadata.deliver_at_time = rng.choice([-1, 0, 2**62])
        metadata.entry_hash_min = 2**32 - 1
    elif shape == 5:
        metadata.replicated_from = SOURCE
        part = metadata.replicated_part
        part.incarnation, part.segment_id = 7, rng.choice([3, 3, 4, 2**64 - 1])
        part.ledger_id = rng.choice([1, 1, 1, 2**63 - 1, 2**64 - 1])
        part.entry_id = rng.choice([0, 1, 2, rng.randrange(1000), 2**64 - 1])
        part.hash_start = rng.choice([0, 0, 100, 65_536])
        part.hash_end = rng.choice([0x7FFF, 0xFFFF, 0, 2**32 - 1])
        part.bucket_end = rng.choice([0xFFFF, 0xFFFF, 0, 99, 2**32 - 1])
    elif shape == 4:
        metadata.txnid_least_bits = metadata.txnid_most_bits = 2**64 - 1
        metadata.compression = pb.ZSTD
        metadata.uncompressed_size = 2**32 - 1
    return build_entry(metadata, payload)
