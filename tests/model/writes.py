"""The model of writes in transactions: headers, claims, logs that are fenced, what readers see.

Transactions, their client, the network, the collector, and what is promised; what an owner of a
segment does is in `write_owner`.
"""

from collections.abc import Iterator

from tests.model.group_state import put
from tests.model.write_owner import OwnerMoves
from tests.model.write_state import (
    ABORTED,
    ACQUIRED,
    ADDED,
    COLLECTED,
    COMMITTED,
    DEAD,
    NOT_ADDED,
    OPEN,
    RUNNING,
    TO_PUT,
    TO_READ,
    TO_READ_AGAIN,
    Claim,
    Segment,
    Sends,
    World,
    Writing,
    fresh_owner,
)


class Writes:
    """See the module's rules."""

    def __init__(self, plan: Writing) -> None:
        self.plan = plan
        self._txns = range(plan.txns)

    def start(self) -> World:
        """Every transaction is open and has its messages to send; each segment has an owner."""
        plan, none = self.plan, (0,) * self.plan.txns
        owner = fresh_owner(plan.txns, RUNNING)
        segment = Segment((), 1, False, (-1,) * plan.txns, 0, (owner,))
        return World(
            headers=(OPEN,) * plan.txns,
            outcomes=("",) * plan.txns,
            unacked=none,
            failed=(False,) * plan.txns,
            todo=((plan.sends,) * plan.segments,) * plan.txns,
            net=((Sends(),) * plan.segments,) * plan.txns,
            copies=plan.copies,
            claims=(),
            listed=(False,) * plan.txns,
            segments=(segment,) * plan.segments,
            added=((TO_READ,) * plan.segments,) * plan.txns if plan.by_coordinator else (),
        )

    # Promises

    def wrong(self, w: World) -> str | None:
        """What owners deliver is committed, what they skip aborted, and something speaks for it."""
        for number, segment in enumerate(w.segments):
            found = _misread(segment, w) or (self.plan.prunes and _uncovered(w, number))
            if found:
                return found
        if "W12-strict" in self.plan.broken:
            for claim in w.claims:
                if w.headers[claim.txn] == COLLECTED:
                    return f"a claim of T{claim.txn} outlives its header"
        return self._order(w) if self.plan.seals else None

    def _order(self, w: World) -> str | None:
        """W14: readers go on to the children when nothing in the parent is undecided."""
        parent = w.segments[0]
        owner = parent.owners[-1]
        if not parent.is_sealed or owner.phase != RUNNING:
            return None
        end = parent.log[-1].position if parent.log else 0
        is_drained = parent.horizon(owner) == end or "W14-drained" in self.plan.broken
        if is_drained and any(not w.outcomes[x.txn] for x in parent.log):
            return "the children are read though an entry of the parent is undecided"
        return None

    def broken(self, before: World, after: World) -> str | None:
        """Headers end once; horizons stay or rise."""
        if before.headers is not after.headers:
            for x, y in zip(before.headers, after.headers, strict=True):
                if x != y and (x + y) not in ("OC", "OA", "CX", "AX"):
                    return f"a header went from {x} to {y}"
        for old, new in zip(before.segments, after.segments, strict=True):
            if old is new:
                continue
            for number, (was, owner) in enumerate(zip(old.owners, new.owners, strict=False)):
                is_running = was.phase == owner.phase == RUNNING
                if is_running and new.horizon(owner) < old.horizon(was):
                    return f"the horizon of owner {number + 1} moved back"
        return None

    def unfinished(self, w: World) -> str | None:
        """Nothing is left, and everything is shown or skipped as it ended."""
        if set(w.headers) != {COLLECTED}:
            return "a header is not collected"
        if w.claims:
            return f"claims are left: {[tuple(x) for x in w.claims]}"
        for segment in w.segments:
            owner = segment.owners[-1]
            if owner.phase != RUNNING:
                return "nobody runs a segment"
            log = segment.log
            if log and (owner.confirmed != len(log) or segment.horizon(owner) != log[-1].position):
                return "a horizon is stuck"
            for entry in log:
                if bool(owner.skips >> entry.txn & 1) != (w.outcomes[entry.txn] == ABORTED):
                    return f"an entry of T{entry.txn} is not seen as it ended"
        return None

    # Moves

    def moves(self, w: World) -> Iterator[tuple[str, World]]:
        """Of transactions and their client, of the collector, of owners."""
        for txn in self._txns:
            yield from self._end(w, txn)
            for number in range(self.plan.segments):
                if self.plan.by_coordinator:
                    yield from self._add(w, txn, number)
                if not self.plan.by_coordinator or w.added[txn][number] == ADDED:
                    yield from self._send(w, txn, number)
            yield from self._collect(w, txn)
        for number, segment in enumerate(w.segments):
            yield from self._acquire(w, number, segment)
            for epoch, owner in enumerate(segment.owners, 1):
                if owner.phase != DEAD:
                    yield from OwnerMoves(self.plan, w, number, epoch).all()

    @staticmethod
    def _end(w: World, txn: int) -> Iterator[tuple[str, World]]:
        if w.headers[txn] != OPEN:
            return
        ends = [ABORTED] if w.unacked[txn] or w.failed[txn] else [COMMITTED, ABORTED]
        for end in ends:
            headers, outcomes = put(w.headers, txn, end), put(w.outcomes, txn, end)
            told = "COMMIT" if end == COMMITTED else "ABORT (client or deadline)"
            yield f"T{txn} {told}", w._replace(headers=headers, outcomes=outcomes)

    @staticmethod
    def _add(w: World, txn: int, segment: int) -> Iterator[tuple[str, World]]:
        """The coordinator reads the header, puts a claim, and reads the header again."""
        at, is_open = w.added[txn][segment], w.headers[txn] == OPEN
        claim = Claim(txn, segment, 0, 0)
        if not w.todo[txn][segment] or at in (ADDED, NOT_ADDED):
            return

        def to(step: str) -> World:
            return w._replace(added=put(w.added, txn, put(w.added[txn], segment, step)))

        if at == TO_READ:
            does = "reads T{} open" if is_open else "refuses to add to T{}"
            yield f"the coordinator {does.format(txn)}", to(TO_PUT if is_open else NOT_ADDED)
            return
        if at == TO_PUT:
            claims = tuple(sorted((*w.claims, claim)))
            after = to(TO_READ_AGAIN)._replace(claims=claims)
            yield f"the coordinator puts a claim of T{txn}", after
        elif is_open:
            yield f"the coordinator reads again that T{txn} is open", to(ADDED)
        else:
            after = to(NOT_ADDED)._replace(claims=tuple(x for x in w.claims if x != claim))
            yield f"the coordinator reads that T{txn} has ended, deletes its claim", after
        yield "!the coordinator crashes", to(NOT_ADDED)

    def _send(self, w: World, txn: int, segment: int) -> Iterator[tuple[str, World]]:
        left, sends = w.todo[txn][segment], w.net[txn][segment]
        if left and not w.outcomes[txn] and not w.failed[txn]:
            yield (
                f"the client sends to segment {segment} in T{txn}",
                w._replace(
                    unacked=put(w.unacked, txn, w.unacked[txn] + 1),
                    todo=put(w.todo, txn, put(w.todo[txn], segment, left - 1)),
                    net=put(w.net, txn, put(w.net[txn], segment, sends.plus(is_copy=False))),
                ),
            )
        if w.copies and left < self.plan.sends:
            net = put(w.net, txn, put(w.net[txn], segment, sends.plus(is_copy=True)))
            yield f"!a SEND of T{txn} comes once more", w._replace(net=net, copies=w.copies - 1)

    def _collect(self, w: World, txn: int) -> Iterator[tuple[str, World]]:
        """W10."""
        if w.headers[txn] not in (COMMITTED, ABORTED):
            return
        if w.listed[txn]:
            headers = put(w.headers, txn, COLLECTED)
            yield f"the collector deletes the header of T{txn}", w._replace(headers=headers)
        elif not any(x.txn == txn for x in w.claims) or "W10-listing" in self.plan.broken:
            listed = put(w.listed, txn, True)
            yield f"the collector lists no claims of T{txn}", w._replace(listed=listed)

    def _acquire(self, w: World, number: int, segment: Segment) -> Iterator[tuple[str, World]]:
        count = len(segment.owners)
        is_dead = segment.owners[-1].phase == DEAD
        if count < self.plan.owners and (is_dead or self.plan.keeps_stale):
            owners = (*segment.owners, fresh_owner(self.plan.txns, ACQUIRED))
            label = f"owner {count + 1} acquires segment {number}"
            if not is_dead:
                label = f"!{label} while the old one runs"
            new = put(w.segments, number, segment._replace(owners=owners))
            yield label, w._replace(segments=new)


def _misread(segment: Segment, w: World) -> str | None:
    for number, owner in enumerate(segment.owners, 1):
        if owner.phase != RUNNING or not owner.confirmed:
            continue
        horizon = segment.horizon(owner)
        for entry in segment.log[: owner.confirmed]:
            if entry.position > horizon:
                break
            out = w.outcomes[entry.txn]
            if owner.skips >> entry.txn & 1:
                if out != ABORTED:
                    return f"owner {number} skips an entry of T{entry.txn}: {out or 'open'}"
            elif out != COMMITTED:
                return f"owner {number} delivers an entry of T{entry.txn}: {out or 'open'}"
    return None


def _uncovered(w: World, number: int) -> str | None:
    segment = w.segments[number]
    for entry in segment.log:
        if w.outcomes[entry.txn] != ABORTED or segment.aborted[entry.txn] >= entry.position:
            continue
        if not any(x.txn == entry.txn and x.segment == number for x in w.claims):
            return f"nothing speaks for an entry of aborted T{entry.txn}"
    return None
