"""What is explored of groups and of segments, and which rule taken out shows in which of it."""

from dataclasses import dataclass, replace

from tests.model.engine import Explored, explore
from tests.model.group_state import Batch
from tests.model.groups import PLAIN, Groups, Plan, Work
from tests.model.segments import Segments, Writing


def work(*batches: tuple[int, int]) -> tuple[Work, ...]:
    """Batches of query 0: number, and how many attempts there are at it."""
    return tuple(Work(Batch(0, number), attempts) for number, attempts in batches)


def of_queries(*queries: int) -> tuple[Work, ...]:
    """The first batch of each of these queries."""
    return tuple(Work(Batch(query, 0)) for query in queries)


ONE = Plan((work((0, 1)), work((0, 1))), older=1)
ATTEMPTS = Plan((work((0, 2)), work((0, 1))), older=1)
LEADERS = replace(ATTEMPTS, leaders=2)
BATCHES = Plan((work((0, 1), (1, 1)),) * 2, older=2)
FAULT = replace(ONE, faults=1)
COLLECTED = replace(ONE, collects=True)
EMPTY = Plan((work((0, 1), (1, 0)), work((0, 1), (1, 0))), older=1, faults=1)
BEGINS_EMPTY = Plan((work((0, 0)), work((0, 1))), faults=1, again=1)
STRAGGLERS = Plan((work((0, 1), (1, 1), (2, 1)), ()), copies=1)
QUERIES = Plan((of_queries(0, 1),) * 2, older=2)
BESIDES = Plan((work((0, 1), (9, PLAIN)), work((0, 1))), older=1)
ATTACHED = Plan((of_queries(0), of_queries(1)), attaches=True)
EXTENDED = Plan((work((0, 1)), work((0, 1))), extends=True, copies=1)
EXTENDED_BY_TWO = Plan((work((0, 2)), ()), extends=True, copies=1, leaders=2)
COLLECTED_IN_ANY_ORDER = Plan((work((0, 1)), work((0, 1), (1, 1))), collects=True, deadlines=False)
HINTED = replace(FAULT, hints=True)

SHORT: dict[str, tuple[Plan | Writing, int]] = {
    "one-attempt-each": (ONE, 1_000),
    "a-lost-answer-or-crash": (FAULT, 5_000),
    "hints": (HINTED, 4_000),
    "the-collector": (COLLECTED, 15_000),
    "two-batches": (BATCHES, 4_000),
    "an-empty-batch-tried-again": (BEGINS_EMPTY, 10_000),
    "a-straggler": (STRAGGLERS, 4_000),
    "two-queries": (QUERIES, 4_000),
    "a-plain-transaction": (BESIDES, 1_500),
    "two-drivers-of-one-epoch": (ATTACHED, 3_000),
    "an-extended-deadline": (replace(EXTENDED, work=(work((0, 1)), ())), 200),
    "a-segment-and-a-stale-owner": (Writing(attempts=1), 4_000),
    "a-segment-and-two-attempts": (Writing(owners=1), 2_000),
}
"""By name; with the number of states that there are at least."""

LONG: dict[str, tuple[Plan | Writing, int]] = {
    "empty-batches": (EMPTY, 20_000),
    "two-attempts": (ATTEMPTS, 30_000),
    "two-leaders": (LEADERS, 40_000),
    "two-leaders-and-a-fault": (replace(LEADERS, faults=1), 100_000),
    "an-extended-deadline-of-two": (EXTENDED_BY_TWO, 30_000),
    "an-extended-deadline-and-an-open": (EXTENDED, 40_000),
    "a-late-copy": (replace(ONE, copies=1), 40_000),
    "a-late-copy-and-a-fault": (replace(FAULT, copies=1), 100_000),
    "faults-and-the-collector": (replace(FAULT, collects=True), 80_000),
    "tried-again-under-faults": (replace(BATCHES, faults=1, again=1), 100_000),
    "the-collector-in-any-order": (COLLECTED_IN_ANY_ORDER, 25_000),
    "a-segment-that-changes-owners": (Writing(keeps_stale=False), 70_000),
    "a-segment-and-three-owners": (Writing(attempts=1, owners=3), 500_000),
}


@dataclass(frozen=True)
class Mutant:
    """A rule that is taken out, where it shows, and as what."""

    rule: str
    shown_in: Plan | Writing
    as_what: str


_SEGMENT = Writing(owners=1)

MUTANTS = (
    Mutant("G1-winners", ATTEMPTS, "shows 2 rows of 1"),
    Mutant("G1-winners", _SEGMENT, "nothing speaks for an entry of aborted"),
    Mutant("G1-losers", _SEGMENT, "the header is not collected"),
    Mutant("G1-reserved", replace(LEADERS, forges=True), "shows 2 rows of 1"),
    Mutant("G2-reserve", LEADERS, "was given twice"),
    Mutant("G2-version", LEADERS, "went from A to O"),
    Mutant("G3-ended", ATTEMPTS, "nonce 0 has groups 0 and 1"),
    Mutant("G3-last", STRAGGLERS, "the holder of the key is told that its key is busy"),
    Mutant("G3-busy", ATTACHED, "are open at once"),
    Mutant("G4-version", ONE, "went from A to C"),
    Mutant("G4-winners", replace(ATTEMPTS, misnames=True), "was never given"),
    Mutant("G4-again", FAULT, "refused, though its group committed"),
    Mutant("G4-empty", EMPTY, "is told done, and is not"),
    Mutant("G4-end", replace(ONE, operator=True), "is committed for no batch"),
    Mutant("G5-name", BATCHES, "is not what the key and its header tell"),
    Mutant("G5-plain", BESIDES, "is not what the key and its header tell"),
    Mutant("G5-carry", BATCHES, "is not what the key and its header tell"),
    Mutant("G5-collect", COLLECTED, "is not what the key and its header tell"),
    Mutant("G5-any", COLLECTED_IN_ANY_ORDER, "is not what the key and its header tell"),
    Mutant("G5-early", ONE, "OPEN tells another batch"),
    Mutant("G5-gone", COLLECTED, "OPEN tells another batch"),
    Mutant("G5-queries", QUERIES, "was committed twice"),
    Mutant("G6-replay", ONE, "was committed twice"),
    Mutant("G6-equal", BATCHES, "was committed twice"),
    Mutant("G6-header", BEGINS_EMPTY, "refused, though its group committed"),
    Mutant("G6-abort", ONE, "is left open"),
    Mutant("G7-epoch", FAULT, "though it is fenced"),
    Mutant("G7-named", ONE, "though it is fenced"),
    Mutant("G7-open", FAULT, "went from C to A"),
    Mutant("G8-version", EXTENDED, "went from A to O"),
    Mutant("G8-falls", EXTENDED_BY_TWO, "the deadline of group 0 fell"),
    Mutant("G9-listing", _SEGMENT, "delivers attempt 0: A"),
    Mutant("G9-winners", _SEGMENT, "delivers attempt 0: A"),
    Mutant("G9-partition", _SEGMENT, "delivers attempt 0: A"),
    Mutant("G9-shared", _SEGMENT, "nothing speaks for an entry of aborted"),
    Mutant("K2-abort", ONE, "is open though epoch 1 was answered"),
    Mutant("K3-version", ONE, "though it is fenced"),
    Mutant("K4-epoch", ONE, "though it is fenced"),
    Mutant("K8-note", COLLECTED, "is not what the key and its header tell"),
)


def explored(plan: Plan | Writing) -> Explored:
    """Every state of that plan, or the shortest run to a broken promise."""
    return explore(Groups(plan)) if isinstance(plan, Plan) else explore(Segments(plan))


def without(mutant: Mutant) -> Explored:
    """The shortest run that goes wrong without its rule."""
    return explored(replace(mutant.shown_in, broken=frozenset({mutant.rule})))
