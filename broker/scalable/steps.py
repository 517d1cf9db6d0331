"""Steps: changes of a topic that must be finished or undone once begun, as durable notes.  Pure."""

import enum
import json
import random
from dataclasses import dataclass
from typing import Final

from broker.placement.typed_request import segment_in, segment_json
from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name
from magnetar.protocol.names import encode_name as url_encode
from storage.metadata.keys import prefix_range

STEPS_ROOT = "/scalable-topic-steps"


class StepKind(enum.Enum):
    """The kind of a change."""

    SPLIT = "split"
    MERGE = "merge"
    REBUCKET = "rebucket"
    MIGRATE = "migrate"
    PRUNE = "prune"
    DELETE = "delete"


RESHAPES: Final = frozenset({StepKind.SPLIT, StepKind.MERGE, StepKind.REBUCKET, StepKind.MIGRATE})
"""The kinds that seal segments and make others."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a topic.  `epoch` is that of the layout it leads to (0 for delete).

    It is noted before anything else is done, and the note is deleted when nothing is left to do.
    The topic's record shows how far it came: if the record was not changed the step is undone (a
    split's children are orphans, a prune has not happened), else it is finished.  A migration
    creates the record.

    Two leaders that try the same change of the same record note steps that differ in nothing but
    their `attempt`.  Neither ends the note of the other, or undoes its step as its own.
    """

    topic: TopicName
    kind: StepKind
    epoch: int
    ends: tuple[SegmentName, ...] = ()
    """Segments that are sealed (a reshape) or deleted (prune, delete)."""
    makes: tuple[SegmentName, ...] = ()
    """Segments that come into being (a reshape)."""
    attempt: str = ""
    """A random id; empty in notes that were written before attempts had one."""
    cause: str = ""
    """The sentence of the policy that decided the change; empty for a change on request.  Another
    process writes it into the history if this one cannot."""
    carries_sequences: bool = False
    """Whether the step ends only when the segments that it makes have their parents' sequence ids.

    A broker of an earlier version, which carries no ids, does not know this member.  The note that
    it encodes differs from the stored one, so it cannot end the step.  A later broker carries the
    ids and ends it.
    """

    @property
    def families(self) -> list[tuple[tuple[SegmentName, ...], tuple[SegmentName, ...]]]:
        """The parents and children that belong together.

        A rebucket of several segments replaces each by one of its own.
        """
        if self.kind is StepKind.REBUCKET:
            return [((end,), (made,)) for end, made in zip(self.ends, self.makes, strict=True)]
        return [(self.ends, self.makes)]

    @property
    def key(self) -> str:
        """The key of the note; all notes are in one level, so a single scan finds them."""
        return f"{_prefix(self.topic)}{self.kind.value}-{self.epoch}"


def new_attempt(rng: random.Random) -> str:
    """Return an id for one attempt at a step."""
    return f"{rng.getrandbits(64):016x}"


def range_of(topic: TopicName) -> tuple[str, str]:
    """Scan bounds of all notes of one topic."""
    return prefix_range(_prefix(topic))


def _prefix(topic: TopicName) -> str:
    return f"{STEPS_ROOT}/{url_encode(str(topic))}:"


def encode(step: Step) -> bytes:
    """Encode the note of a step."""
    members: dict[str, object] = {
        "topic": str(step.topic),
        "kind": step.kind.value,
        "epoch": step.epoch,
        "ends": [segment_json(segment) for segment in step.ends],
        "makes": [segment_json(segment) for segment in step.makes],
    }
    if step.attempt:
        members["attempt"] = step.attempt
    if step.cause:
        members["cause"] = step.cause
    if step.carries_sequences:
        members["carriesSequences"] = True
    return json.dumps(members, separators=(",", ":")).encode()


def decode(value: bytes) -> Step:
    """Decode the note of a step.  Raises ValueError, KeyError, `InvalidTopicName`."""
    members = json.loads(value)
    return Step(
        parse_topic_name(members["topic"]),
        StepKind(members["kind"]),
        int(members["epoch"]),
        tuple(segment_in(each) for each in members["ends"]),
        tuple(segment_in(each) for each in members["makes"]),
        str(members.get("attempt", "")),
        str(members.get("cause", "")),
        bool(members.get("carriesSequences", False)),
    )
