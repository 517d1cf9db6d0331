"""The model of ids: coordinators that reserve numbers, make headers and end transactions.

END comes doubled, late, and to a coordinator that another one has replaced; deadlines and the
collector come at any time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.group_state import put

OPEN, COMMITTED, ABORTED, MISSING = "O", "C", "A", "X"
NO_ID = NO_TXN = NO_VERSION = -1
BLOCK = 2
"""Numbers are reserved so many at once."""
READ_COUNTER, RESERVE, HAS_BLOCK = range(3)

NOT_FOUND, WRONG_STATE = "not found", "wrong state"


class Header(NamedTuple):
    """Of the transaction with that id."""

    id: int
    state: str
    version: int


class End(NamedTuple):
    """An END that a coordinator is at, or a deadline (of no client's transaction)."""

    txn: int
    id: int
    end: str
    state: str = ""
    """What was read; "" before."""
    version: int = NO_VERSION


class Coordinator(NamedTuple):
    """One that leads, or thinks so; `counter`: as it was read; its block goes up to `end`."""

    phase: int = READ_COUNTER
    counter: int = 0
    next: int = 0
    end: int = 0
    job: End | None = None


class Txn(NamedTuple):
    """As its client knows it, and how it has ended."""

    id: int = NO_ID
    wish: str = ""
    answers: frozenset[str] = frozenset()
    outcome: str = ""

    def told(self, answer: str) -> "Txn":
        """One more answer."""
        return self._replace(answers=self.answers | {answer})


class World(NamedTuple):
    """Everything.  `aborted`: ids that a segment hides."""

    counter: int
    headers: tuple[Header, ...]
    gone: tuple[int, ...]
    aborted: tuple[int, ...]
    coordinators: tuple[Coordinator, ...]
    txns: tuple[Txn, ...]
    left: tuple[int, ...]
    clock: int

    def header(self, txn_id: int) -> Header | None:
        """The one of that id."""
        return next((x for x in self.headers if x.id == txn_id), None)

    def with_coordinator(self, at: int, coordinator: Coordinator) -> "World":
        """With that one changed."""
        return self._replace(coordinators=put(self.coordinators, at, coordinator))


@dataclass(frozen=True)
class Numbering:
    """What happens in a run."""

    txns: int = 1
    coordinators: int = 2
    ends: int = 2
    """How often the client asks for the end of each."""
    restarts_versions: bool = False
    """The versions of a key begin anew when it is put again; else no version comes again."""
    broken: frozenset[str] = frozenset()


class Ids:
    """See the module's rules."""

    def __init__(self, plan: Numbering) -> None:
        self.plan = plan

    def start(self) -> World:
        """Nothing is reserved."""
        plan = self.plan
        coordinators = (Coordinator(),) * plan.coordinators
        return World(0, (), (), (), coordinators, (Txn(),) * plan.txns, (plan.ends,) * plan.txns, 0)

    # Promises

    def wrong(self, w: World) -> str | None:
        """An id is of one transaction; answers are true; what committed is not hidden."""
        given = [x.id for x in w.txns if x.id != NO_ID]
        if len(given) != len(set(given)):
            return "two transactions share an id"
        for header in w.headers:
            if header.id in w.gone:
                return f"header {header.id} is there again after it was collected"
        for number, txn in enumerate(w.txns):
            if txn.answers & {COMMITTED, ABORTED} - {txn.outcome}:
                return f"an answer about T{number} is not true"
            if txn.outcome == COMMITTED and txn.id in w.aborted:
                return f"committed T{number} is hidden"
        return None

    def broken(self, before: World, after: World) -> str | None:
        """A header ends once."""
        for was in before.headers:
            header = after.header(was.id)
            if header is not None and was.state not in (header.state, OPEN):
                return f"header {was.id} went from {was.state} to {header.state}"
        return None

    def unfinished(self, w: World) -> str | None:
        """Nothing is left."""
        return "headers are left" if w.headers else None

    # Moves

    def moves(self, w: World) -> Iterator[tuple[str, World]]:
        """Of the coordinators, and of the collector."""
        for at in range(self.plan.coordinators):
            yield from self._reserve(w, at)
            if w.coordinators[at].job is not None:
                yield from self._go_on(w, at)
            else:
                yield from self._begin(w, at)
                yield from self._take(w, at)
        for header in w.headers:
            if header.state != OPEN:
                left = tuple(x for x in w.headers if x != header)
                gone = tuple(sorted({*w.gone, header.id}))
                after = w._replace(headers=left, gone=gone)
                yield f"the collector deletes header {header.id}", after

    def _reserve(self, w: World, at: int) -> Iterator[tuple[str, World]]:
        """T1: by compare-and-set, before use."""
        who, me = f"coordinator {at + 1}", w.coordinators[at]
        if me.phase == READ_COUNTER:
            new = me._replace(phase=RESERVE, counter=w.counter)
            yield f"{who} reads the counter {w.counter}", w.with_coordinator(at, new)
        elif me.phase == RESERVE and (me.counter == w.counter or "T1-blind" in self.plan.broken):
            top = me.counter + BLOCK
            new = me._replace(phase=HAS_BLOCK, counter=0, next=me.counter, end=top)
            after = w.with_coordinator(at, new)._replace(counter=top)
            yield f"{who} reserves {me.counter} to {top - 1}", after
        elif me.phase == RESERVE:
            new = me._replace(phase=READ_COUNTER, counter=0)
            yield f"{who} finds the counter changed", w.with_coordinator(at, new)

    def _with_header(self, w: World, txn_id: int, state: str) -> World:
        old = w.header(txn_id)
        version = w.clock + 1
        if self.plan.restarts_versions:
            version = old.version + 1 if old is not None else 0
        others = [x for x in w.headers if x.id != txn_id]
        headers = tuple(sorted([*others, Header(txn_id, state, version)]))
        return w._replace(headers=headers, clock=max(w.clock + 1, version))

    def _begin(self, w: World, at: int) -> Iterator[tuple[str, World]]:
        """T1: a header is put where there is none."""
        who, me = f"coordinator {at + 1}", w.coordinators[at]
        number = next((n for n, x in enumerate(w.txns) if x.id == NO_ID), None)
        if me.phase != HAS_BLOCK or me.next >= me.end or number is None:
            return
        after = w.with_coordinator(at, me._replace(next=me.next + 1))
        if w.header(me.next) is not None:
            yield f"{who} finds that {me.next} is taken", after
        else:
            after = self._with_header(after, me.next, OPEN)
            txns = put(w.txns, number, w.txns[number]._replace(id=me.next))
            yield f"{who} begins T{number} as {me.next}", after._replace(txns=txns)

    def _take(self, w: World, at: int) -> Iterator[tuple[str, World]]:
        """An END, the first or one more, or a deadline."""
        who, me = f"coordinator {at + 1}", w.coordinators[at]
        for number, txn in enumerate(w.txns):
            if txn.id == NO_ID or not w.left[number]:
                continue
            for end in [txn.wish] if txn.wish else [COMMITTED, ABORTED]:
                after = w.with_coordinator(at, me._replace(job=End(number, txn.id, end)))
                after = after._replace(
                    txns=put(w.txns, number, txn._replace(wish=end)),
                    left=put(w.left, number, w.left[number] - 1),
                )
                yield f"{who} gets END {end} of T{number}", after
        for header in w.headers:
            if header.state == OPEN:
                job = End(NO_TXN, header.id, ABORTED, OPEN, header.version)
                after = w.with_coordinator(at, me._replace(job=job))
                yield f"{who} sees the deadline of {header.id}", after

    def _go_on(self, w: World, at: int) -> Iterator[tuple[str, World]]:
        """T2: read, decide, write on the version read, else read again.  T3: make nothing."""
        who, me = f"coordinator {at + 1}", w.coordinators[at]
        job = me.job
        assert job is not None
        header = w.header(job.id)
        if not job.state:
            state, version = (header.state, header.version) if header else (MISSING, NO_VERSION)
            new = me._replace(job=job._replace(state=state, version=version))
            yield f"{who} reads header {job.id}: {state}", w.with_coordinator(at, new)
        elif job.state == MISSING and "T3-makes" not in self.plan.broken:
            after = self._answered(w, at, NOT_FOUND)
            yield f"{who} answers that {job.id} is not found", after
        elif job.state in (COMMITTED, ABORTED):
            answer = job.end if job.state == job.end else WRONG_STATE
            yield f"{who} answers {answer} for {job.id}", self._answered(w, at, answer)
        elif self._may_write(header, job):
            after = self._with_header(self._answered(w, at, job.end), job.id, job.end)
            txns = tuple(
                x._replace(outcome=x.outcome or job.end) if x.id == job.id else x
                for x in after.txns
            )
            hidden = {*w.aborted, job.id} if job.end == ABORTED else set(w.aborted)
            after = after._replace(txns=txns, aborted=tuple(sorted(hidden)))
            yield f"{who} ends {job.id}: {job.end}", after
        else:
            again = me._replace(job=job._replace(state=""))
            label = f"{who} finds header {job.id} changed, reads again"
            yield label, w.with_coordinator(at, again)

    def _may_write(self, header: Header | None, job: End) -> bool:
        if header is None:
            return "T3-makes" in self.plan.broken
        return header.version == job.version or "T2-version" in self.plan.broken

    @staticmethod
    def _answered(w: World, at: int, answer: str) -> World:
        me = w.coordinators[at]
        after = w.with_coordinator(at, me._replace(job=None))
        job = me.job
        if job is None or job.txn == NO_TXN:
            return after
        return after._replace(txns=put(w.txns, job.txn, w.txns[job.txn].told(answer)))
