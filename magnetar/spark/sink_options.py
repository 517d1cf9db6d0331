"""Options of the sink, checked when it is made; docs/spark.md has them as a table.  Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from magnetar import CompressionType
from magnetar.spark.errors import InvalidOption
from magnetar.spark.key_log import MessageRef
from magnetar.spark.options import CONNECTION_OPTIONS, Connection, Options

__all__ = ["SINK_OPTIONS", "Delivery", "SinkOptions", "StateOption", "TransactionKeyOption"]

SINK_OPTIONS: Final = (
    *CONNECTION_OPTIONS,
    "topic",
    "txnKey",
    "txnEpoch",
    "stateTopic",
    "stateFrom",
    "trackPositions",
    "delivery",
    "compression",
    "chunking",
    "txnTimeoutMs",
    "jobId",
    "positions",
    "checkpointLocation",
    "queryName",
)
"""The options of a sink, with those that Spark itself gives to sinks."""
DEFAULT_TIMEOUT_MS: Final = 60_000


class Delivery(enum.Enum):
    """How often readers of the topic see a row of the query."""

    EXACTLY_ONCE = "exactly-once"
    """Once, whatever fails, once its batch is committed."""
    AT_LEAST_ONCE = "at-least-once"
    """As soon as it is written, and again when its task or batch is tried again."""


class Compression(enum.Enum):
    """The compression of batches of messages."""

    NONE = "none"
    LZ4 = "lz4"
    ZLIB = "zlib"
    ZSTD = "zstd"
    SNAPPY = "snappy"


@dataclass(frozen=True, slots=True)
class TransactionKeyOption:
    """The transaction key, and the epoch with which it was opened for this run of the query."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class StateOption:
    """The state topic of a key that brokers do not have, and the message to read from."""

    topic: str
    start: MessageRef
    """The `state` message of the opener."""

    @property
    def options(self) -> Mapping[str, str]:
        """The options for a sink."""
        return {"stateTopic": self.topic, "stateFrom": str(self.start)}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one sink, checked.  `key` is None for at-least-once alone."""

    connection: Connection
    topic: str
    delivery: Delivery
    key: TransactionKeyOption | None
    state: StateOption | None
    """None: brokers have the key."""
    timeout_s: float
    """How long a group stays open after the last sign of life of its attempts."""
    compression: CompressionType
    chunking: bool
    """Whether values above what brokers take are sent in chunks."""
    track_positions: bool
    checkpoint: str | None
    job: str | None
    positions: str | None
    """A text that a batch write keeps with its decision."""

    @classmethod
    def of(cls, given: Mapping[str, str], *, streaming: bool) -> "SinkOptions":
        """Check and convert the options of Spark.  Raises `InvalidOption`."""
        options = Options(given)
        options.refuse_unknown(SINK_OPTIONS)
        delivery = options.choice("delivery", Delivery, Delivery.EXACTLY_ONCE)
        found = cls(
            connection=Connection.of(options),
            topic=options.topic(),
            delivery=delivery,
            key=_key(options) if delivery is Delivery.EXACTLY_ONCE else None,
            state=_state(options) if delivery is Delivery.EXACTLY_ONCE else None,
            timeout_s=(options.number("txnTimeoutMs") or DEFAULT_TIMEOUT_MS) / 1000,
            compression=CompressionType[
                options.choice("compression", Compression, Compression.NONE).name
            ],
            chunking=options.flag("chunking", default=False),
            track_positions=options.flag("trackPositions", default=False),
            checkpoint=options.text("checkpointLocation"),
            job=options.text("jobId"),
            positions=options.text("positions"),
        )
        found._check(streaming=streaming)
        return found

    def _check(self, *, streaming: bool) -> None:
        exactly_once = self.delivery is Delivery.EXACTLY_ONCE
        if self.track_positions and not (streaming and exactly_once and self.checkpoint):
            raise InvalidOption(
                "trackPositions keeps how far a streaming query has read in the transaction of "
                "its batches: it needs delivery=exactly-once and the option checkpointLocation of "
                "this query (Spark does not give sinks that of the session)."
            )
        if streaming and self.job is not None:
            raise InvalidOption(
                "jobId is for batch writes; a streaming query is known by its checkpoint. "
                "Leave it out."
            )
        if self.positions is not None and (streaming or not exactly_once):
            raise InvalidOption(
                "positions are kept with the decision of a batch write that is exactly-once; of a "
                "streaming query trackPositions keeps them. Leave the option positions out."
            )


def _key(options: Options) -> TransactionKeyOption:
    name, epoch = options.text("txnKey"), options.number("txnEpoch", at_least=0)
    if name is None or epoch is None:
        raise InvalidOption(
            "Exactly once needs a transaction key, opened anew before every start of the query, "
            "so that an earlier driver that still runs is shut out:\n"
            '    key = magnetar.spark.open_key("pulsar://host:6650", "orders-to-bills")\n'
            '    df.writeStream.format("pulsar5").options(**key.options)...\n'
            "Or say that rows may come twice: delivery=at-least-once."
        )
    return TransactionKeyOption(name, epoch)


def _state(options: Options) -> StateOption | None:
    topic, start = options.text("stateTopic"), options.text("stateFrom")
    if topic is None and start is None:
        return None
    try:
        if topic is not None:
            return StateOption(topic, MessageRef.parse(start or ""))
    except ValueError:
        pass  # reported below
    raise InvalidOption(
        f"The options stateTopic ({topic}) and stateFrom ({start}) say where a transaction key "
        "is kept: give both as `magnetar.spark.open_key(...).options` has them, or none."
    )
