"""What is explored of writes, acknowledgements and ids; each rule taken out, and where it shows."""

from dataclasses import dataclass, replace

from tests.model.ack_state import Acking
from tests.model.acks import Acks
from tests.model.engine import Explored, explore
from tests.model.ids import Ids, Numbering
from tests.model.order_state import RULES, Habit, Left, Ordering
from tests.model.ordered import Ordered
from tests.model.write_state import Writing
from tests.model.writes import Writes

Scope = Writing | Acking | Ordering | Numbering


@dataclass(frozen=True)
class Clean:
    """What keeps every promise, in so many states."""

    scope: Scope
    states: int


@dataclass(frozen=True)
class Missed:
    """What breaks a promise, after so many steps."""

    scope: Scope
    as_what: str
    steps: int


def explored(scope: Scope) -> Explored:
    """Every state of that scope, or the shortest run to a broken promise."""
    if isinstance(scope, Writing):
        return explore(Writes(scope))
    if isinstance(scope, Acking):
        return explore(Acks(scope))
    if isinstance(scope, Ordering):
        return explore(Ordered(scope))
    return explore(Ids(scope))


# What is clean

WRITE = Writing()
BY_COORDINATOR = Writing(watermark=True, by_coordinator=True)
SEALED = Writing(segments=2, copies=0, seals=True, keeps_stale=False)
ONE_ACK = Acking(plan=((1,),))
TWO_ACKS = Acking(plan=((1,), (1,)))
FAULTS = Left(plain=1, cut=1, load=1, failover=1, deadline=1)
"""Everything but a seek."""
SUBJECT_TO_ALL = Ordering(left=FAULTS)
CAREFUL = replace(SUBJECT_TO_ALL, habit=Habit.CAREFUL)
FULL_ORDER = Ordering(entries=3, left=Left(cut=1, load=1, deadline=1))
FAILOVER = replace(FULL_ORDER, left=Left(failover=1, load=1, deadline=1))
SEEKS = Ordering(left=Left(seek=1, deadline=1, cut=1, load=1, failover=1))
MORE_IS_WANTED = Ordering(batches=True, left=Left(load=1))
WHO_IS_RECORDED = RULES | {"record-who"}

QUICK: dict[str, Clean] = {
    "writes-two-owners": Clean(WRITE, 28_415),
    "writes-two-messages": Clean(replace(WRITE, sends=2), 108_100),
    "writes-watermark": Clean(replace(WRITE, watermark=True), 46_792),
    "writes-claims-by-the-coordinator": Clean(replace(BY_COORDINATOR, prunes=False), 25_727),
    "acks-a-late-copy": Clean(replace(ONE_ACK, copies=1), 3_889),
    "acks-two-transactions": Clean(TWO_ACKS, 61_549),
    "acks-a-seek": Clean(replace(ONE_ACK, seeks=1), 869),
    "ordered-three-entries": Clean(Ordering(entries=3, txns=3), 5_331),
    "ordered-deadline-cut-load": Clean(FULL_ORDER, 20_331),
    "ordered-failover": Clean(FAILOVER, 42_483),
    "ordered-failover-individual": Clean(replace(FAILOVER, single_first=True), 14_805),
    "ordered-plain-acks": Clean(Ordering(entries=3, left=Left(plain=2, cut=1, deadline=1)), 50_028),
    "ordered-seek-three-txns": Clean(Ordering(entries=3, txns=3, left=Left(seek=1, cut=1)), 40_339),
    "ordered-seek-faults": Clean(SEEKS, 32_999),
    "ordered-all-faults": Clean(SUBJECT_TO_ALL, 76_701),
    "ordered-all-faults-individual": Clean(replace(SUBJECT_TO_ALL, single_first=True), 44_303),
    "ordered-more-is-wanted": Clean(Ordering(entries=3, batches=True, left=Left(cut=1)), 2_718),
    "ordered-more-is-wanted-who-is-recorded": Clean(
        replace(MORE_IS_WANTED, rules=WHO_IS_RECORDED), 698
    ),
    "ordered-two-at-once-A10": Clean(
        Ordering(pipelines=True, left=Left(deadline=1, cut=1), rules=RULES | {"A10"}), 4_488
    ),
    "ordered-never-asks-has-nothing-else": Clean(Ordering(entries=1, habit=Habit.DEAF), 21),
    "ids": Clean(Numbering(), 5_922),
    "ids-versions-begin-anew": Clean(Numbering(restarts_versions=True), 5_922),
}
"""Those of seconds."""

LONG: dict[str, Clean] = {
    "writes-sealed": Clean(SEALED, 254_060),
    "acks-two-messages": Clean(Acking(plan=((1, 2),), copies=1), 59_186),
    "acks-cumulative": Clean(Acking(plan=((3,), (1,))), 61_549),
    "acks-no-header-read": Clean(replace(TWO_ACKS, reads_header=False), 46_461),
    "ordered-careful": Clean(CAREFUL, 106_688),
    "ordered-who-is-recorded": Clean(replace(SUBJECT_TO_ALL, rules=WHO_IS_RECORDED), 76_958),
    "ordered-three-txns": Clean(replace(SUBJECT_TO_ALL, txns=3), 329_469),
}
"""Those of ten seconds."""

NIGHTLY: dict[str, Clean] = {
    "writes-two-txns": Clean(Writing(txns=2, copies=0, keeps_stale=False), 453_726),
    "writes-two-txns-watermark": Clean(
        Writing(txns=2, copies=0, keeps_stale=False, watermark=True), 711_304
    ),
    "writes-sealed-stale": Clean(replace(SEALED, keeps_stale=True, crashes=False), 2_110_903),
    "writes-three-owners": Clean(replace(WRITE, owners=3), 3_314_336),
    "acks-three-owners": Clean(replace(TWO_ACKS, owners=3), 1_739_635),
    "ordered-careful-three-txns": Clean(replace(CAREFUL, txns=3), 470_403),
    "ordered-all-faults-three-entries": Clean(replace(SUBJECT_TO_ALL, entries=3), 501_998),
    "ids-two-txns": Clean(Numbering(txns=2), 1_245_762),
}
"""Those of minutes."""


# What goes wrong without a rule


def _writes(rule: str, as_what: str, steps: int, scope: Writing = WRITE) -> Missed:
    return Missed(replace(scope, broken=frozenset({rule})), as_what, steps)


def _acks(rule: str, as_what: str, steps: int, scope: Acking = ONE_ACK) -> Missed:
    return Missed(replace(scope, broken=frozenset({rule})), as_what, steps)


UNPRUNED = replace(WRITE, prunes=False)
UNCOVERED = "nothing speaks for an entry of aborted T0"
IS_OPEN, IS_ABORTED = "delivers an entry of T0: open", "delivers an entry of T0: A"
AGAIN = "a message is delivered again whose acknowledgement in T0 was answered"
LOST, STUCK, CONFLICT = "entries 1 are lost", "never come", "a false conflict"
LEFT = "at rest: holds are left"

MUTANTS: dict[str, Missed] = {
    "W1-parallel": _writes("W1-parallel", IS_OPEN, 7, UNPRUNED),
    "W2-cached": _writes("W2-cached", IS_ABORTED, 10),
    "W3-loaded": _writes("W3-loaded", IS_ABORTED, 17, UNPRUNED),
    "W4-wait": _writes("W4-wait", UNCOVERED, 9),
    "W4-fenced": _writes("W4-fenced", UNCOVERED, 11),
    "W5-order": _writes("W5-order", IS_ABORTED, 14, UNPRUNED),
    "W5-blind": _writes("W5-blind", UNCOVERED, 20),
    "W6-all": _writes("W6-all", UNCOVERED, 17),
    "W7-scan": _writes("W7-scan", IS_OPEN, 10),
    "W8-first": _writes("W8-first", IS_ABORTED, 16),
    "W9-missing": _writes("W9-missing", "skips an entry of T0: C", 16),
    "W9-unknown": _writes("W9-unknown", "skips an entry of T0: C", 16),
    "W10-listing": _writes("W10-listing", IS_ABORTED, 10),
    "W11-rescan": _writes("W11-rescan", "at rest: a header is not collected", 10),
    "W12-strict": _writes("W12-strict", "a claim of T0 outlives its header", 5),
    "W13-watermark": _writes("W13-watermark", IS_OPEN, 12, replace(WRITE, watermark=True)),
    "W14-drained": _writes("W14-drained", "an entry of the parent is undecided", 7, SEALED),
    "C1-epoch": Missed(BY_COORDINATOR, UNCOVERED, 17),
    "C2-header": _writes("C2-header", UNCOVERED, 12, BY_COORDINATOR),
    "C3-rescan": _writes("W11-rescan", "at rest: a header is not collected", 4, BY_COORDINATOR),
    "A1-owner": _acks("A1-owner", AGAIN, 9, TWO_ACKS),
    "A1-owner-twice": _acks(
        "A1-owner", "hold one message", 14, replace(TWO_ACKS, judges_delivery=False)
    ),
    "A2-durable": _acks("A2-durable", AGAIN, 12),
    "A3-fence": _acks("A3-fence", AGAIN, 14),
    "A3-early": _acks("A3-early", AGAIN, 15),
    "A4-positions": _acks("A4-positions", AGAIN, 9),
    "A5-void": _acks("A5-void", "acknowledged in nothing that committed", 11),
    "A6-rescan": _acks("A6-rescan", "at rest: a header or a record is left", 9),
    "A7-finish": _acks("A7-finish", "is applied again", 15, replace(ONE_ACK, seeks=1)),
    "T1-blind": Missed(
        Numbering(txns=2, broken=frozenset({"T1-blind"})), "two transactions share an id", 9
    ),
    "T2-version": Missed(Numbering(broken=frozenset({"T2-version"})), "went from C to A", 8),
    "T3-makes": Missed(Numbering(broken=frozenset({"T3-makes"})), "is there again", 8),
}

LONG_MUTANTS: dict[str, Missed] = {
    "W6-newer": _writes("W6-newer", UNCOVERED, 18, replace(WRITE, owners=3)),
}


# ... and of consumers in order


def _without(*rules: str) -> frozenset[str]:
    return RULES - set(rules)


IN_TXNS = Ordering()
PLAIN = Ordering(txns=1, left=Left(plain=1))
TAKEN_OVER = Ordering(left=Left(failover=1))
TAKEN_OVER_PLAIN = Ordering(txns=1, left=Left(plain=1, failover=1))
SINGLE = replace(TAKEN_OVER, single_first=True)
SINGLE_PLAIN = replace(TAKEN_OVER_PLAIN, single_first=True)


def _ordered(
    scope: Ordering, rules: frozenset[str], as_what: str, steps: int, judges: str = "all"
) -> Missed:
    return Missed(replace(scope, rules=rules, judges=judges), as_what, steps)


ORDER_MUTANTS: dict[str, Missed] = {
    "A8-pass": _ordered(IN_TXNS, _without("A8-pass"), LOST, 15),
    "A8-pass-plain": _ordered(PLAIN, _without("A8-pass"), LOST, 11),
    "A8-before-the-rewind": _ordered(Ordering(left=Left(cut=1)), RULES | {"cached"}, LOST, 16),
    "A8-refuse": _ordered(IN_TXNS, _without("A8-refuse"), CONFLICT, 10),
    "A8-seek": _ordered(
        Ordering(left=Left(seek=1)), _without("A8-seek"), "a seek is undone", 15, "loss"
    ),
    "A9-individual": _ordered(SINGLE, _without("A9"), LOST, 15),
    "A9-individual-plain": _ordered(SINGLE_PLAIN, _without("A9"), LOST, 10),
    "A9-cumulative": _ordered(TAKEN_OVER, _without("A9", "A9-cumulative"), LOST, 15),
    "A9-cumulative-plain": _ordered(TAKEN_OVER_PLAIN, _without("A9", "A9-cumulative"), LOST, 10),
    "A9-loaded": _ordered(
        Ordering(left=Left(load=1, failover=1)), RULES | {"loaded-own"}, LOST, 16
    ),
    "A9-more-is-wanted": _ordered(MORE_IS_WANTED, RULES, LEFT, 6),
    "A10-two-at-once": _ordered(Ordering(pipelines=True), RULES, LOST, 14),
    "A10-until-sent": _ordered(Ordering(pipelines=True), RULES | {"sent"}, LOST, 16),
    "A10-never-asks": _ordered(
        Ordering(entries=1, habit=Habit.DEAF), RULES | {"A10"}, CONFLICT, 11
    ),
    "A11-epochs": _ordered(Ordering(has_epochs=False), RULES, LOST, 15),
    "A11-asks": _ordered(Ordering(habit=Habit.DEAF), RULES, LOST, 14),
}

# What was tried instead of A8 and A9: see the table in the README


@dataclass(frozen=True)
class Tried:
    """Rules that were tried, and a client's habit.

    Of each question how many steps the shortest run has that goes wrong, 0 where there is none.
    """

    rules: frozenset[str]
    lost: int = 0
    lost_plain: int = 0
    conflict: int = 0
    individual: int = 0
    individual_plain: int = 0
    habit: Habit = Habit.STOCK

    def missed(self) -> dict[str, Missed]:
        """Each question, and what is expected of it."""
        loss = {
            "lost": (IN_TXNS, self.lost),
            "lost-plain": (PLAIN, self.lost_plain),
            "individual": (SINGLE, self.individual),
            "individual-plain": (SINGLE_PLAIN, self.individual_plain),
        }
        asked = {
            name: _ordered(replace(scope, habit=self.habit), self.rules, LOST, steps, "loss")
            for name, (scope, steps) in loss.items()
        }
        scope = replace(IN_TXNS, habit=self.habit)
        asked["conflict"] = _ordered(scope, self.rules, CONFLICT, self.conflict, "conflict")
        return asked


HEARD = frozenset({"A9-cumulative"})
"""No header is read: an end counts when the owner hears of it."""
BOTH = HEARD | {"A8-pass", "A8-refuse"}
NONE = frozenset({"none"})

TRIED: dict[str, Tried] = {
    "heard": Tried(HEARD, 15, 11, 10, 14, 9),
    "sent": Tried(HEARD | {"sent"}, 17, 13, 10, 16, 12),
    "A10": Tried(HEARD | {"A10"}, 0, 11, 10, 0, 9),
    "pass": Tried(HEARD | {"A8-pass"}, 0, 0, 10, 15, 10),
    "refuse": Tried(HEARD | {"A8-refuse"}, 15, 11, 0, 14, 9),
    "both": Tried(BOTH, 0, 0, 0, 15, 10),
    "none": Tried(NONE, 0, 0, 10, 0, 0),
    "none-refuse": Tried(NONE | {"A8-refuse"}),
    "careful": Tried(HEARD, 15, 11, 10, 14, 9, Habit.CAREFUL),
    "careful-sent": Tried(HEARD | {"sent"}, 0, 13, 10, 0, 12, Habit.CAREFUL),
    "rules": Tried(RULES),
}

TRIED_STUCK: dict[str, Missed] = {
    "sent-A8-plain": _ordered(
        Ordering(txns=1, left=Left(plain=1, cut=1)), RULES | {"sent"}, STUCK, 13
    ),
    "A10-plain-shortened": _ordered(
        replace(PLAIN, left=Left(plain=2)), HEARD | {"A10", "A10-plain"}, STUCK, 16, "loss"
    ),
    "none-refuse-more-is-wanted": _ordered(
        Ordering(batches=True, left=Left(cut=1)), NONE | {"A8-refuse"}, LEFT, 6
    ),
}

CUT_AND_LOAD = Left(cut=1, load=1, deadline=1)

TRIED_CLEAN: dict[str, Ordering] = {
    "careful-sent": Ordering(
        habit=Habit.CAREFUL, rules=HEARD | {"sent"}, judges="loss", left=CUT_AND_LOAD
    ),
    "A10": Ordering(rules=HEARD | {"A10"}, judges="loss", left=CUT_AND_LOAD),
    "A10-individual": Ordering(
        rules=HEARD | {"A10"}, judges="loss", left=Left(failover=1, deadline=1), single_first=True
    ),
    "both": Ordering(rules=BOTH, left=CUT_AND_LOAD),
    "both-plain": Ordering(rules=BOTH, left=Left(plain=2, cut=1, deadline=1)),
    "none": Ordering(rules=NONE, judges="loss", left=FAULTS),
    "none-refuse": Ordering(rules=NONE | {"A8-refuse"}, left=FAULTS),
    "none-refuse-individual": Ordering(rules=NONE | {"A8-refuse"}, left=FAULTS, single_first=True),
}
"""What is clean under faults too."""
