"""The rules of an audit, and its findings.

Pure.  A rule says what must hold; a violation names a place where it does not.
"""

import enum
from dataclasses import dataclass, field
from typing import Final

from magnetar.protocol.ids import Position

__all__ = ["Findings", "Rule", "Violation"]

KEPT_EACH: Final = 1000
"""The most violations of one rule that are kept with their places; others are only counted."""


class Rule(enum.Enum):
    """The rules V1 to V7; the value is the sentence that reports show."""

    V1 = "a committed transaction is visible as a whole"
    V2 = "nothing of an aborted or open transaction is in any view"
    V3 = "nothing is lost and nothing is there twice"
    V4 = "messages of a producer with one key are in the order in which it sent them"
    V5 = "no record and no entry is left that nothing speaks for"
    V6 = "epochs of a key rise, and batches of a query follow each other"
    V7 = "positions are those that the last committed group recorded"


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a rule does not hold; `what` is a sentence."""

    rule: Rule
    what: str
    segment_id: int | None = None
    position: Position | None = None
    txn: str | None = None


@dataclass(slots=True)
class Findings:
    """The violations, with counts of checks and of facts that could not be checked."""

    violations: list[Violation] = field(default_factory=list)
    counts: dict[Rule, int] = field(default_factory=lambda: dict.fromkeys(Rule, 0))
    checked: dict[Rule, int] = field(default_factory=lambda: dict.fromkeys(Rule, 0))
    """The number of checks of each rule, by transaction, range, producer or batch."""
    unchecked: dict[str, int] = field(default_factory=dict)
    """Sentences about facts that could not be checked, each with its number of times."""

    def add(self, violation: Violation) -> None:
        """Add a violation."""
        self.counts[violation.rule] += 1
        if self.counts[violation.rule] <= KEPT_EACH:
            self.violations.append(violation)

    def count_check(self, rule: Rule, times: int = 1) -> None:
        """Count checks of a rule."""
        self.checked[rule] += times

    def cannot_tell(self, why: str, times: int = 1) -> None:
        """Count facts that could not be checked, with the reason as a sentence."""
        self.unchecked[why] = self.unchecked.get(why, 0) + times

    def merge(self, other: "Findings") -> None:
        """Add the findings of another part."""
        for violation in other.violations:
            if len(self.violations) < KEPT_EACH * len(Rule):
                self.violations.append(violation)
        for rule in Rule:
            self.counts[rule] += other.counts[rule]
            self.checked[rule] += other.checked[rule]
        for why, times in other.unchecked.items():
            self.cannot_tell(why, times)

    @property
    def is_clean(self) -> bool:
        """No violation at all."""
        return not any(self.counts.values())
