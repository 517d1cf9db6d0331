"""What the owner does about consumers in order: it sends, takes acknowledgements, hears of ends."""

from collections.abc import Iterator

from tests.model.order_state import (
    ABORT_TOLD,
    COMMIT_TOLD,
    COMMITTED,
    OPEN,
    AckInTxn,
    Answer,
    Hold,
    Message,
    Ordering,
    Owner,
    PlainAck,
    Redeliver,
    World,
)

Moves = Iterator[tuple[str, World]]


def heard(headers: tuple[str, ...], owner: Owner, txn: int) -> Owner:
    """The owner applies or releases what an ended transaction holds; a release rewinds."""
    for hold in owner.holds:
        if hold.txn != txn:
            continue
        owner = owner._replace(holds=tuple(x for x in owner.holds if x != hold))
        if headers[txn] == COMMITTED:
            owner = owner._replace(cursor=owner.cursor | hold.entries)
            continue
        gone = hold.entries & ~owner.cursor
        owner = owner._replace(passed=owner.passed | gone, read=0, next=0)
        if gone and owner.furthest >= (gone & -gone).bit_length():
            owner = owner._replace(released=owner.released | gone)
    return owner


class OrderOwner:
    """What the owner may do next."""

    def __init__(self, plan: Ordering) -> None:
        self._plan, self._rules = plan, plan.rules

    def moves(self, w: World) -> Moves:
        """It hears of an end, takes what comes first on the wire, sends on."""
        for txn, header in enumerate(w.headers):
            if header != OPEN and any(x.txn == txn for x in w.owner.holds):
                does = "committed, applies" if header == COMMITTED else "aborted, releases"
                after = w._replace(owner=heard(w.headers, w.owner, txn))
                yield f"the owner hears or reads that T{txn} is {does}", after
        if w.up:
            yield from self._take(w._replace(up=w.up[1:]), w.up[0])
        yield from self._send(w)

    # What comes

    def _take(self, w: World, first: Redeliver | AckInTxn | PlainAck) -> Moves:
        owner = w.owner
        if isinstance(first, Redeliver):
            read = owner.read if "cached" in self._rules else 0
            new = Owner(
                owner.cursor, owner.holds, epoch=first.epoch, passed=owner.passed, read=read
            )
            yield "the owner rewinds as asked", w._replace(owner=new)
        elif isinstance(first, PlainAck):
            entries = (1 << first.upto) - 1
            barred = owner.passed if self._rules & {"sent", "A10-plain"} else 0
            barred |= owner.released if "A10-plain" in self._rules else 0
            barred &= entries & ~owner.cursor
            if barred:
                entries &= (barred & -barred) - 1
            label = f"the owner takes a plain acknowledgement of entries {entries:b}"
            yield label, w._replace(owner=owner._replace(cursor=owner.cursor | entries))
        else:
            yield from self._take_in_txn(w, first)

    def _take_in_txn(self, w: World, ack: AckInTxn) -> Moves:
        owner, rules = w.owner, self._rules
        entries = (1 << ack.upto) - 1
        if self._plan.single_first and ack.txn == 0:
            entries = 1 << ack.upto - 1
        against = [x.txn for x in owner.holds if x.txn != ack.txn and x.entries & entries]
        if "A8-refuse" in rules and any(w.headers[x] != OPEN for x in against):
            return  # The header is read first: the owner hears of the end.
        barred = owner.passed if "sent" in rules else 0
        barred |= owner.released if "A10" in rules else 0
        if owner.cursor >> ack.upto - 1 & 1:
            yield self._refused(w, ack, "it is acknowledged already", is_false=True)
        elif against:
            is_false = w.known[against[0]] in COMMIT_TOLD + ABORT_TOLD
            yield self._refused(w, ack, f"T{against[0]} holds it", is_false=is_false)
        elif entries & ~owner.cursor & barred:
            yield self._refused(w, ack, "it covers what an abort released", is_false=True)
        else:
            holds = tuple(sorted((*owner.holds, Hold(ack.txn, entries, w.client.who))))
            after = w._replace(
                down=(*w.down, Answer(True, ack.txn)), owner=owner._replace(holds=holds)
            )
            yield f"the owner takes the acknowledgement up to {ack.upto} of T{ack.txn}", after

    def _refused(self, w: World, ack: AckInTxn, why: str, *, is_false: bool) -> tuple[str, World]:
        is_false = is_false and ack.alone and self._plan.judges != "loss"
        problem = f"a false conflict: T{ack.txn} is refused, as {why}" if is_false else ""
        after = w._replace(down=(*w.down, Answer(False, ack.txn)), problem=problem)
        return f"the owner refuses the acknowledgement of T{ack.txn}: {why}", after

    # What goes

    def _send(self, w: World) -> Moves:
        """The next entry that is neither acknowledged nor held, if holds may be passed over."""
        owner, passing = w.owner, 0
        for at in range(owner.next, self._plan.entries):
            bit = 1 << at
            if owner.cursor & bit:
                continue
            holds = [x for x in owner.holds if x.entries & bit]
            if not holds:
                new = owner._replace(
                    next=at + 1,
                    passed=(owner.passed | passing) & ~bit,
                    furthest=max(owner.furthest, at + 1),
                )
                over = f", passes over {passing:b}" if passing else ""
                down = (*w.down, Message(at + 1, owner.epoch))
                yield f"the owner sends {at + 1}{over}", w._replace(down=down, owner=new)
                return
            if "none" in self._rules or any(self._is_barrier(w, x) for x in holds):
                return
            unread = [x.txn for x in holds if not owner.read >> x.txn & 1]
            if unread and "A8-pass" in self._rules:
                if w.headers[unread[0]] == OPEN:
                    new = owner._replace(read=owner.read | 1 << unread[0])
                    yield f"the owner reads that T{unread[0]} is open", w._replace(owner=new)
                return
            passing |= bit

    def _is_barrier(self, w: World, hold: Hold) -> bool:
        """A9: another consumer's."""
        if hold.who == w.client.who:
            return False
        is_single = self._plan.single_first and hold.txn == 0
        return "A9" in self._rules or ("A9-cumulative" in self._rules and not is_single)
