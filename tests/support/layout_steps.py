"""The durable steps of a layout change, as patterns of writes after which a broker may die.

The patterns are those of `DyingBroker.die_at`.  A change is undone if its broker dies before the
topic's record is written, else finished (see the README of broker/scalable).
"""

import enum
from collections.abc import Sequence
from typing import Final

from broker.scalable.steps import StepKind
from config.bounds import SPLIT_PARTS_MAX
from tests.support.dying_broker import WITH

_CARRIED: Final = "[]"
"""The value of AWAITED_PROPERTY when a child has the ids of its parents."""


class DiesAfter(enum.Enum):
    """The last write that a broker makes for a layout change."""

    NOTED = "the note"
    PREPARED = "the subscription of a child"
    PUBLISHED = "the topic's record"
    RECORDED = "the history"
    SEALING = "the first write that seals"
    CARRYING = "the first write that gives sequence ids to a child"
    ENDED = "the end of the note"

    @property
    def by_an_owner(self) -> bool:
        """Whether the owner of a segment writes it, who need not lead the topic."""
        return self in (DiesAfter.SEALING, DiesAfter.CARRYING)

    @property
    def undone(self) -> bool:
        """Whether the next leader undoes the change."""
        return self in (DiesAfter.NOTED, DiesAfter.PREPARED)

    def patterns(
        self,
        topic: str,
        kind: StepKind,
        next_segment_id: int,
        audit: str,
        parent: int | None = None,
    ) -> Sequence[str]:
        """The writes up to this one, of the next change of this kind of a topic.

        `topic` is a local name; `next_segment_id` that of the first child; `audit` a subscription
        on which nothing is acknowledged, so that its cursors are only written when created.  Of
        several parents `parent` is the one that is being sealed; None: any.
        """
        note = f"^put /scalable-topic-steps/.*{topic}:{kind.value}-"
        record, history = f"^put /topics/.*/{topic}$", f"^put /topics/.*/{topic}/history/"
        ledgers = f"^put /managed-ledgers/.*/segment/{topic}/[0-9a-f]*-[0-9a-f]*-"
        number = "[0-9]+" if parent is None else str(parent)
        ordinary = f"^put /managed-ledgers/.*/persistent/{topic}(-partition-{number})?$"
        children = "|".join(str(next_segment_id + n) for n in range(SPLIT_PARTS_MAX))
        return {
            DiesAfter.NOTED: [note],
            DiesAfter.PREPARED: [note, f"^put /managed-ledgers/.*/{audit}$"],
            DiesAfter.PUBLISHED: [note, record],
            DiesAfter.RECORDED: [note, record, history],
            DiesAfter.SEALING: [note, record, f"{ledgers}(?!({children})$){number}$|{ordinary}"],
            DiesAfter.CARRYING: [note, record, history, f"{ledgers}({children})${WITH}{_CARRIED}"],
            DiesAfter.ENDED: [note, record, note.replace("put", "delete")],
        }[self]
