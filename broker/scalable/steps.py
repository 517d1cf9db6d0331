"""Work on a topic that must be finished once it is begun: durable notes, read at the next start.
Pure.

Rules:

- A step is noted before anything else is done, and the note goes when nothing is left to do.
- Whether the topic's record was changed already tells where a step stands: not changed means
  *undo* (a split's children are orphans, a prune has not happened), changed means *finish*.
- Notes lie in one flat level, so a start finds all of them with one scan.
"""

import enum
import json
from dataclasses import dataclass

from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name, segment_name
from magnetar.protocol.names import encode_name as url_encode
from storage.metadata.keys import prefix_range

STEPS_ROOT = "/scalable-topic-steps"


class StepKind(enum.Enum):
    """What was begun."""

    SPLIT = "split"
    MERGE = "merge"
    PRUNE = "prune"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work.  `epoch` is that of the layout it leads to (0 for delete)."""

    topic: TopicName
    kind: StepKind
    epoch: int
    ends: tuple[SegmentName, ...] = ()
    """Segments that are sealed (split, merge) or deleted (prune, delete)."""
    makes: tuple[SegmentName, ...] = ()

    @property
    def key(self) -> str:
        """Where the note lies."""
        return f"{_prefix(self.topic)}{self.kind.value}-{self.epoch}"


def range_of(topic: TopicName) -> tuple[str, str]:
    """Scan bounds of all notes of one topic."""
    return prefix_range(_prefix(topic))


def _prefix(topic: TopicName) -> str:
    return f"{STEPS_ROOT}/{url_encode(str(topic))}:"


def encode(step: Step) -> bytes:
    """The stored form."""
    members = {
        "topic": str(step.topic),
        "kind": step.kind.value,
        "epoch": step.epoch,
        "ends": [str(segment) for segment in step.ends],
        "makes": [str(segment) for segment in step.makes],
    }
    return json.dumps(members, separators=(",", ":")).encode()


def decode(value: bytes) -> Step:
    """The step in a stored note.  Raises ValueError, KeyError, `InvalidTopicName`."""
    members = json.loads(value)
    return Step(
        parse_topic_name(members["topic"]),
        StepKind(members["kind"]),
        int(members["epoch"]),
        tuple(segment_name(parse_topic_name(text)) for text in members["ends"]),
        tuple(segment_name(parse_topic_name(text)) for text in members["makes"]),
    )
