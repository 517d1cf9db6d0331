"""The model of acknowledgements in transactions: records, a durable cursor, loads, a seek.

Transactions, their client, the collector, and what is promised; what an owner does is in
`ack_owner`.
"""

from collections.abc import Iterator

from tests.model.ack_owner import OwnerMoves
from tests.model.ack_state import (
    ABORTED,
    ACQUIRED,
    COLLECTED,
    COMMITTED,
    DEAD,
    OPEN,
    RUNNING,
    Ack,
    Acking,
    Cursor,
    Owner,
    World,
)
from tests.model.group_state import put


class Acks:
    """See the module's rules."""

    def __init__(self, plan: Acking) -> None:
        self.plan = plan
        self._txns = range(len(plan.plan))

    def start(self) -> World:
        """Every transaction is open and has its messages to acknowledge."""
        count = len(self.plan.plan)
        none, no = (0,) * count, (False,) * count
        return World(
            headers=(OPEN,) * count,
            outcomes=("",) * count,
            unacked=none,
            failed=no,
            todo=self.plan.plan,
            net=(),
            copies=self.plan.copies,
            answered=none,
            records=(),
            listed=no,
            owner_epoch=1,
            cursor=Cursor(0, 1),
            owners=(Owner(RUNNING, ("-",) * count),),
            seeks=self.plan.seeks,
        )

    # Promises

    def wrong(self, w: World) -> str | None:
        """Of each message one transaction at most holds an acknowledgement; it takes effect."""
        taken = allowed = 0
        for txn in self._txns:
            if w.outcomes[txn] != ABORTED:
                if taken & w.answered[txn]:
                    return "two transactions that did not abort hold one message"
                taken |= w.answered[txn]
            if w.outcomes[txn] == COMMITTED:
                for mask in self.plan.plan[txn]:
                    allowed |= mask
        for mask in (w.cursor.mask, *(x.memory for x in w.owners if x.phase == RUNNING)):
            if mask & ~allowed:
                return "a message is acknowledged in nothing that committed"
        return self._delivered(w) if self.plan.judges_delivery else None

    def _delivered(self, w: World) -> str | None:
        owner = w.owners[-1]
        if owner.phase != RUNNING:
            return None
        for txn in self._txns:
            if w.outcomes[txn] == ABORTED or w.undone >> txn & 1:
                continue
            held = owner.memory
            for pending in owner.pending:
                if pending.txn == txn:
                    held |= pending.mask
            if w.answered[txn] & ~held:
                return f"a message is delivered again whose acknowledgement in T{txn} was answered"
        return None

    def broken(self, before: World, after: World) -> str | None:
        """Headers end once; what a seek has undone is not applied again."""
        if before.headers is not after.headers:
            for x, y in zip(before.headers, after.headers, strict=True):
                if x != y and (x + y) not in ("OC", "OA", "CX", "AX"):
                    return f"a header went from {x} to {y}"
        return after.problem or None

    def unfinished(self, w: World) -> str | None:
        """Nothing is left, and what was committed is in the durable cursor."""
        if set(w.headers) != {COLLECTED} or w.records:
            return "a header or a record is left"
        if w.owners[-1].phase != RUNNING or w.owners[-1].pending:
            return "acknowledgements are pending"
        for txn in self._txns:
            is_undone = w.undone >> txn & 1
            if w.outcomes[txn] == COMMITTED and not is_undone and w.answered[txn] & ~w.cursor.mask:
                return f"the cursor lacks what T{txn} has committed"
        return None

    # Moves

    def moves(self, w: World) -> Iterator[tuple[str, World]]:
        """Of transactions and their client, of the collector, of owners."""
        for txn in self._txns:
            yield from self._end(w, txn)
            yield from self._ack(w, txn)
            yield from self._collect(w, txn)
        count = len(w.owners)
        if count < self.plan.owners:
            new = Owner(ACQUIRED, ("-",) * len(self.plan.plan))
            label = f"owner {count + 1} acquires the segment"
            if w.owners[-1].phase != DEAD:
                label = f"!{label} while the old one runs"
            yield label, w._replace(owner_epoch=count + 1, owners=(*w.owners, new))
        for epoch, owner in enumerate(w.owners, 1):
            if owner.phase != DEAD:
                yield from OwnerMoves(self.plan, w, epoch).all()

    @staticmethod
    def _end(w: World, txn: int) -> Iterator[tuple[str, World]]:
        if w.headers[txn] != OPEN:
            return
        ends = [ABORTED] if w.unacked[txn] or w.failed[txn] else [COMMITTED, ABORTED]
        for end in ends:
            headers, outcomes = put(w.headers, txn, end), put(w.outcomes, txn, end)
            told = "COMMIT" if end == COMMITTED else "ABORT (client or deadline)"
            yield f"T{txn} {told}", w._replace(headers=headers, outcomes=outcomes)

    def _ack(self, w: World, txn: int) -> Iterator[tuple[str, World]]:
        todo = w.todo[txn]
        if todo and not w.outcomes[txn] and not w.failed[txn]:
            yield (
                f"the client acknowledges {todo[0]} in T{txn}",
                w._replace(
                    unacked=put(w.unacked, txn, w.unacked[txn] + 1),
                    todo=put(w.todo, txn, todo[1:]),
                    net=tuple(sorted((*w.net, Ack(txn, todo[0], False)))),
                ),
            )
        masks = self.plan.plan[txn]
        if w.copies and len(todo) < len(masks):
            net = tuple(sorted((*w.net, Ack(txn, masks[0], True))))
            yield f"!an ACK in T{txn} comes once more", w._replace(net=net, copies=w.copies - 1)

    @staticmethod
    def _collect(w: World, txn: int) -> Iterator[tuple[str, World]]:
        if w.headers[txn] not in (COMMITTED, ABORTED):
            return
        if w.listed[txn]:
            headers = put(w.headers, txn, COLLECTED)
            yield f"the collector deletes the header of T{txn}", w._replace(headers=headers)
        elif not any(x.txn == txn for x in w.records):
            listed = put(w.listed, txn, True)
            yield f"the collector lists no records of T{txn}", w._replace(listed=listed)
