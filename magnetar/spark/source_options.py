"""Options of the source, checked when it is made; docs/spark.md has them as a table.  Pure."""

import enum
from dataclasses import dataclass
from typing import Final

from magnetar.spark.cut import Cut
from magnetar.spark.cut_json import cut_of_text
from magnetar.spark.errors import InvalidCut, InvalidOption
from magnetar.spark.options import Connection, Options
from magnetar.spark.range_planning import Budget, Ordering
from magnetar.spark.sink_options import SINK_OPTIONS
from magnetar.spark.starting import Bound, BoundKind, bound_of

__all__ = ["SOURCE_OPTIONS", "Decoding", "SourceOptions"]

SOURCE_OPTIONS: Final = (
    "topic",
    "name",
    "start",
    "end",
    "ordering",
    "chain",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "maxRowsPerSecond",
    "alignBy",
    "alignWindowMs",
    "clockSkewMs",
    "failOnDataLoss",
    "failOnDamage",
    "decode",
    "decodeSchema",
    "onCorrupt",
    "pushFilters",
)
ALIGN_WINDOW_MS: Final = 60_000
TASK_BYTES: Final = 64 * 1024 * 1024
"""Bytes of stored entries that one task reads of a segment, where order does not matter."""


class Decoding(enum.Enum):
    """How values become the column `data`."""

    NONE = "none"
    AVRO = "avro"
    JSON = "json"


class _Alignment(enum.Enum):
    NONE = "none"
    PUBLISH_TIME = "publish_time"


class _OnCorrupt(enum.Enum):
    FAIL = "fail"
    COLUMN = "column"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one source, checked.  Durations are in the unit that the name ends with."""

    connection: Connection
    topic: str
    """The full name: `topic://tenant/namespace/name`, or another domain."""
    name: str
    start: Bound | None
    end: Bound
    ordering: Ordering | None
    """None: the default of a stream or of a batch."""
    chain: bool
    budget: Budget
    rows_per_second: int | None
    window_ms: int | None
    clock_skew_ms: int | None
    fail_on_data_loss: bool
    fail_on_damage: bool
    decoding: Decoding
    definition: str | None
    """An Avro definition in place of the topic's."""
    corrupt_column: bool
    push_filters: bool

    @classmethod
    def of(cls, options: Options) -> "SourceOptions":
        """Check and convert the options of Spark.  Raises `InvalidOption`."""
        # Sink options are known too, and mean nothing here: users give one dict to both.
        options.refuse_unknown((*SOURCE_OPTIONS, *SINK_OPTIONS))
        aligned = options.choice("alignBy", _Alignment, _Alignment.NONE)
        window_ms = options.number("alignWindowMs") or ALIGN_WINDOW_MS
        start, ordering = options.text("start"), options.text("ordering")
        decoding = options.choice("decode", Decoding, Decoding.NONE)
        on_corrupt = options.choice("onCorrupt", _OnCorrupt, _OnCorrupt.FAIL)
        definition = options.text("decodeSchema")
        if decoding is Decoding.NONE and (definition or on_corrupt is _OnCorrupt.COLUMN):
            raise InvalidOption(
                "The options decodeSchema and onCorrupt say how values are decoded; give decode as "
                "well, or leave them out."
            )
        return cls(
            connection=Connection.of(options),
            topic=options.topic(),
            name=options.text("name") or "",
            start=None if start is None else bound_of("start", start),
            end=bound_of("end", options.text("end") or "latest"),
            ordering=options.choice("ordering", Ordering, Ordering.KEY) if ordering else None,
            chain=options.flag("chain", default=False),
            budget=Budget(
                options.number("maxRowsPerTrigger"), options.number("maxBytesPerTrigger")
            ),
            rows_per_second=options.number("maxRowsPerSecond"),
            window_ms=window_ms if aligned is _Alignment.PUBLISH_TIME else None,
            clock_skew_ms=options.number("clockSkewMs", at_least=0),
            fail_on_data_loss=options.flag("failOnDataLoss", default=True),
            fail_on_damage=options.flag("failOnDamage", default=True),
            decoding=decoding,
            definition=definition,
            corrupt_column=on_corrupt is _OnCorrupt.COLUMN,
            push_filters=options.flag("pushFilters", default=False),
        )

    @property
    def end_cut(self) -> Cut | None:
        """The cut at which a stream ends; None if it goes on.  Raises `InvalidCut`."""
        if self.end.kind is not BoundKind.CUT:
            return None
        cut = cut_of_text(self.end.text, self.topic, self.name)
        if any(place.batch_index for place in cut.pos.values()):
            raise InvalidCut(
                "The end of a stream lies between entries; give a cut whose positions have the "
                "index 0, as those of offsets have."
            )
        return cut

    @property
    def nowhere(self) -> Cut:
        """A cut of this source without positions."""
        return Cut(self.topic, self.name)

    def check_stream(self) -> None:
        """Refuse options that only a batch has.  Raises `InvalidOption`."""
        if self.end.kind not in (BoundKind.LATEST, BoundKind.CUT):
            raise InvalidOption(
                "A stream ends at a cut, which a restart does not move, or has no end: give the "
                "option end a cut, leave it out, or read a batch (spark.read)."
            )

    def check_batch(self) -> None:
        """Refuse options that only a stream has.  Raises `InvalidOption`."""
        if self.ordering is Ordering.KEY or self.chain:
            raise InvalidOption(
                "The tasks of a batch run side by side, so it has no order: leave the options "
                "ordering and chain out, and sort by order_key within each key."
            )
        if self.window_ms is not None or self.budget != Budget() or self.rows_per_second:
            raise InvalidOption(
                "A batch is read at once: leave the options alignBy, maxRowsPerTrigger, "
                "maxBytesPerTrigger and maxRowsPerSecond out."
            )
