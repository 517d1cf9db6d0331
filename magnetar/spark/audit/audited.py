"""The segments that an audit found right for good, so that the next one reads only new ones.

Pure but for `load` and `store`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

from magnetar.protocol.ids import Position
from magnetar.spark.audit.snapshot import SegmentState, Snapshot
from magnetar.spark.errors import PipelineError
from magnetar.spark.range_facts import SeenProducer, SeenRange, Stamp, Tally

__all__ = [
    "AuditState",
    "AuditedSegment",
    "InvalidState",
    "state_after_audit",
    "decode",
    "encode",
    "load",
    "unchanged_segments",
    "store",
]

VERSION: Final = 1
PRODUCERS_KEPT: Final = 10_000
"""The most producers of a segment that is kept: the state has the last message of each."""


class InvalidState(PipelineError):
    """The state file of an earlier audit cannot be used."""


class AuditedSegment(NamedTuple):
    """A segment whose entries need not be read again, with the facts for checks of other ones.

    What records say of its transactions is still checked each time.
    """

    topic: str
    end: Position
    readable: Tally
    last_of_producer: Mapping[str, Stamp]

    def producers(self, segment_id: int) -> list[SeenProducer]:
        """The producers of a segment as a scan returns them, to compare later messages with."""
        return [
            SeenProducer(segment_id, name, stamp, stamp, 0)
            for name, stamp in self.last_of_producer.items()
        ]


@dataclass(frozen=True, slots=True)
class AuditState:
    """The segments of a topic that need not be read again."""

    topic: str
    segments: Mapping[int, AuditedSegment]


def unchanged_segments(kept: AuditState, snapshot: Snapshot) -> dict[int, AuditedSegment]:
    """The segments of which nothing has changed.

    Raises `InvalidState` if it is of another topic.
    """
    if kept.topic != snapshot.topic:
        raise InvalidState(
            f"The state is of an audit of {kept.topic}, not of {snapshot.topic}; "
            "give each topic a file of its own."
        )
    # By name and end: a topic that was deleted and made anew has other ledgers.
    return {
        segment_id: before
        for segment_id, before in kept.segments.items()
        if (segment := snapshot.segments.get(segment_id)) is not None
        and segment.sealed
        and (segment.topic, segment.raw_end) == (before.topic, before.end)
    }


def state_after_audit(
    snapshot: Snapshot,
    before: Mapping[int, AuditedSegment],
    seen: Mapping[int, SeenRange],
    readable: Mapping[int, tuple[int, int]],
) -> AuditState:
    """The segments that need not be read again after an audit without violations."""
    kept = dict(before)
    for segment_id, segment in snapshot.segments.items():
        scanned = seen.get(segment_id)
        if segment_id in before or not _is_final(segment, scanned):
            continue
        producers = {} if scanned is None else scanned.producers
        kept[segment_id] = AuditedSegment(
            segment.topic,
            segment.raw_end,
            Tally(*readable.get(segment_id, (0, 0))),
            {name: each.last for name, each in producers.items()},
        )
    return AuditState(snapshot.topic, kept)


def _is_final(segment: SegmentState, scanned: SeenRange | None) -> bool:
    """Whether nothing in a segment will change, and all of it could be checked."""
    # Sealed, and readable to its end: no entry will come, and no transaction there is open.
    if not segment.sealed or segment.horizon < segment.raw_end or segment.trimmed_to is not None:
        return False
    if scanned is None:
        return True
    return (
        not (scanned.incomplete or scanned.encrypted) and len(scanned.producers) <= PRODUCERS_KEPT
    )


def encode(audited: AuditState) -> str:
    """The state as JSON; equal facts have equal texts."""
    segments = {
        str(segment_id): {
            "end": list(each.end),
            "producers": {name: list(stamp) for name, stamp in each.last_of_producer.items()},
            "readable": list(each.readable),
            "topic": each.topic,
        }
        for segment_id, each in audited.segments.items()
    }
    document = {"segments": segments, "topic": audited.topic, "v": VERSION}
    return json.dumps(document, sort_keys=True) + "\n"


def decode(text: str) -> AuditState:
    """Read the state from its JSON.  Raises `InvalidState`."""
    try:
        document = json.loads(text)
        if document["v"] != VERSION:
            raise InvalidState(
                f"The state is of version {document['v']}, this audit writes {VERSION}; "
                "give another file, and everything is read again."
            )
        segments = cast("dict[str, dict[str, object]]", document["segments"])
        found = {int(segment_id): _segment(each) for segment_id, each in segments.items()}
        return AuditState(str(document["topic"]), found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidState(
            "The state is not what an audit wrote; give another file, and everything is read again."
        ) from error


def load(path: Path) -> AuditState | None:
    """Read the state of an earlier audit; None if there is none.  Raises `InvalidState`."""
    try:
        return decode(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidState(
            f"The state {path} cannot be read ({error}); give another file."
        ) from error


def store(path: Path, audited: AuditState) -> None:
    """Write the state to a file, whole or not at all.  Raises `InvalidState`."""
    beside = path.with_name(path.name + ".new")
    try:
        beside.write_text(encode(audited), "utf-8")
        beside.replace(path)
    except OSError as error:
        raise InvalidState(
            f"The state {path} cannot be written ({error}); give another file."
        ) from error


def _segment(record: Mapping[str, object]) -> AuditedSegment:
    end = cast("list[int]", record["end"])
    readable = cast("list[int]", record["readable"])
    producers = cast("dict[str, list[int]]", record["producers"])
    return AuditedSegment(
        str(record["topic"]),
        Position(*end),
        Tally(*readable),
        {name: Stamp(*stamp) for name, stamp in producers.items()},
    )
