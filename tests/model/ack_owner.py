"""What one owner of a segment does about acknowledgements in transactions: load, take, apply, free.

Each rule that can be taken out has a name; the plan's `broken` holds those that are.
"""

from collections.abc import Iterator

from tests.model.ack_state import (
    ABORTED,
    ACQUIRED,
    APPLIED,
    CHECKED,
    COLLECTED,
    COMMITTED,
    DEAD,
    FENCING,
    FREED,
    HELD,
    OPEN,
    PROVED,
    PUT,
    READING,
    RUNNING,
    SCANNING,
    UNREAD,
    Acking,
    Cursor,
    Owner,
    Pending,
    World,
)
from tests.model.group_state import put

Moves = Iterator[tuple[str, World]]


class OwnerMoves:
    """What one owner may do next."""

    def __init__(self, plan: Acking, w: World, epoch: int) -> None:
        self._plan, self._broken, self._w, self._epoch = plan, plan.broken, w, epoch
        self._owner = w.owners[epoch - 1]
        self._who = f"owner {epoch} "
        self._is_last = epoch == len(w.owners)

    def all(self) -> Moves:
        """A crash, the load or what comes after it."""
        if not self._is_last or len(self._w.owners) < self._plan.owners:
            yield f"!{self._who}crashes", self._stopped()
        if self._owner.phase != RUNNING:
            yield from self._load()
            return
        yield from self._take()
        for pending in sorted(set(self._owner.pending)):
            yield from self._record(pending)
            yield from self._finish(pending)
        yield from self._make_durable()
        for txn in range(len(self._plan.plan)):
            yield from self._follow(txn)
            yield from self._rescan(txn)
        yield from self._seek()

    # The world after it

    def _with(self, owner: Owner) -> World:
        return self._w._replace(owners=put(self._w.owners, self._epoch - 1, owner))

    def _stopped(self) -> World:
        return self._with(Owner(DEAD, ("-",) * len(self._plan.plan)))

    def _without(self, pending: Pending) -> tuple[Pending, ...]:
        at = self._owner.pending.index(pending)
        return self._owner.pending[:at] + self._owner.pending[at + 1 :]

    def _moved(self, pending: Pending, state: str) -> Owner:
        rest = (*self._without(pending), pending._replace(state=state))
        return self._owner._replace(pending=tuple(sorted(rest)))

    # Load

    def _load(self) -> Moves:
        """A3: fence the cursor by a write, read it, scan records, read headers."""
        owner, who, cursor = self._owner, self._who, self._w.cursor
        fenced = Cursor(cursor.mask, self._epoch)
        read = owner._replace(memory=cursor.mask, durable=cursor.mask)
        if cursor.fence > self._epoch:
            yield f"{who}finds a newer fence, stops", self._stopped()
        elif owner.phase == ACQUIRED and "A3-early" in self._broken:
            yield f"{who}reads the cursor", self._with(read._replace(phase=FENCING))
        elif owner.phase == ACQUIRED and "A3-fence" in self._broken:
            label = f"{who}reads the cursor and fences nothing"
            yield label, self._with(read._replace(phase=SCANNING))
        elif owner.phase == ACQUIRED:
            after = self._with(read._replace(phase=SCANNING))._replace(cursor=fenced)
            yield f"{who}fences and reads the cursor", after
        elif owner.phase == FENCING:
            after = self._with(owner._replace(phase=SCANNING))._replace(cursor=fenced)
            yield f"{who}fences the cursor", after
        elif owner.phase == SCANNING:
            new = owner._replace(phase=READING, pending=self._scanned())
            yield f"{who}scans records", self._with(new)
        else:
            yield f"{who}reads headers, runs", self._with(self._read())

    def _scanned(self) -> tuple[Pending, ...]:
        return tuple(
            Pending(x.txn, x.mask, UNREAD, x.epoch, x.is_copy)
            for x in self._w.records
            if x.epoch <= self._epoch
        )

    def _read(self) -> Owner:
        """A4, A5: messages come back with their transactions; what has no header is void."""
        owner = self._owner
        view, found = owner.view, []
        for pending in owner.pending:
            header, txn = self._w.headers[pending.txn], pending.txn
            if header == COLLECTED and "A5-void" in self._broken:
                found.append(pending._replace(state=HELD))
                view = put(view, txn, "c")
            elif header == COLLECTED:
                found.append(pending._replace(state=FREED))
            elif header == OPEN and "A4-positions" in self._broken:
                view = put(view, txn, "l")
            else:
                found.append(pending._replace(state=FREED if header == ABORTED else HELD))
                view = put(view, txn, {OPEN: "l", COMMITTED: "c", ABORTED: "a"}[header])
        return owner._replace(phase=RUNNING, view=view, pending=tuple(sorted(found)))

    # An ACK

    def _take(self) -> Moves:
        owner, w = self._owner, self._w
        held = owner.memory
        for pending in owner.pending:
            if pending.state != FREED:
                held |= pending.mask
        for ack in sorted(set(w.net)):
            txn, mask, is_copy = ack
            at = w.net.index(ack)
            taken = w._replace(net=w.net[:at] + w.net[at + 1 :])
            failed = w.failed if is_copy else put(w.failed, txn, True)
            again = any((x.txn, x.mask, x.epoch) == (txn, mask, self._epoch) for x in owner.pending)
            if owner.view[txn] in "cav":
                yield f"{self._who}refuses {mask} of T{txn}: ended", taken._replace(failed=failed)
            elif mask & held or again:
                label = f"{self._who}refuses {mask} of T{txn}: conflict"
                yield label, taken._replace(failed=failed)
            else:
                new = Pending(txn, mask, PUT, self._epoch, is_copy)
                new_owner = owner._replace(pending=tuple(sorted((*owner.pending, new))))
                after = self._with(new_owner)._replace(net=taken.net)
                yield f"{self._who}takes {mask} of T{txn}", after

    def _record(self, pending: Pending) -> Moves:
        """A1: the record is durable, then ownership is proven, then it is answered."""
        w, owner, (txn, mask, state, _, is_copy) = self._w, self._owner, pending
        failed = w.failed if is_copy else put(w.failed, txn, True)
        if state == PUT:
            knows = owner.view[txn] in "oca" or not self._plan.reads_header
            after = self._with(self._moved(pending, PROVED if knows else CHECKED))
            records = tuple(sorted((*w.records, pending.record)))
            label = f"{self._who}: the record of {mask} of T{txn} is durable"
            yield label, after._replace(records=records)
        elif state == CHECKED and w.headers[txn] == OPEN:
            new = self._moved(pending, PROVED)._replace(view=put(owner.view, txn, "o"))
            yield f"{self._who}reads that T{txn} is open, after the record", self._with(new)
        elif state == CHECKED:
            after = self._with(self._moved(pending, FREED))._replace(failed=failed)
            yield f"{self._who}reads that T{txn} has ended, refuses", after
        elif state == PROVED and (w.owner_epoch == self._epoch or "A1-owner" in self._broken):
            view = put(owner.view, txn, "o") if owner.view[txn] in "-l" else owner.view
            after = self._with(self._moved(pending, HELD)._replace(view=view))
            if not is_copy:
                after = after._replace(
                    unacked=put(w.unacked, txn, w.unacked[txn] - 1),
                    answered=put(w.answered, txn, w.answered[txn] | mask),
                )
            yield f"{self._who}is still the owner, answers {mask} of T{txn}", after
        elif state == PROVED:
            after = self._stopped()._replace(failed=failed)
            yield f"{self._who}is not the owner any more, refuses and stops", after

    # An end

    def _finish(self, pending: Pending) -> Moves:
        """A2: apply, make durable, and only then delete the record."""
        w, owner, who, (txn, mask, state, _, _) = self._w, self._owner, self._who, pending
        deleted = self._with(owner._replace(pending=self._without(pending)))
        deleted = deleted._replace(records=tuple(x for x in w.records if x != pending.record))
        if state == HELD and owner.view[txn] == "c":
            is_undone = self._is_last and w.undone >> txn & 1
            problem = f"what a seek undid of T{txn} is applied again" if is_undone else ""
            applied = self._moved(pending, APPLIED)._replace(memory=owner.memory | mask)
            yield f"{who}applies {mask} of T{txn}", self._with(applied)._replace(problem=problem)
            if "A2-durable" in self._broken:
                new = owner._replace(pending=self._without(pending), memory=owner.memory | mask)
                after = self._with(new)._replace(records=deleted.records, problem=problem)
                yield f"{who}applies {mask} of T{txn} and deletes its record", after
        elif state == HELD and owner.view[txn] in "av":
            yield f"{who}releases {mask} of T{txn}", self._with(self._moved(pending, FREED))
        elif state == FREED or (state == APPLIED and not mask & ~owner.durable):
            yield f"{who}deletes the record of {mask} of T{txn}", deleted

    def _make_durable(self) -> Moves:
        owner, cursor = self._owner, self._w.cursor
        if owner.memory == owner.durable:
            return
        if cursor.fence <= self._epoch:
            after = self._with(owner._replace(durable=owner.memory))
            after = after._replace(cursor=Cursor(owner.memory, cursor.fence))
            yield f"{self._who}makes the cursor {owner.memory} durable", after
        else:
            yield f"{self._who}finds its cursor fenced, stops", self._stopped()

    def _follow(self, txn: int) -> Moves:
        owner, header = self._owner, self._w.headers[txn]
        if owner.view[txn] in "lo" and header != OPEN:
            seen = {COMMITTED: "c", ABORTED: "a", COLLECTED: "v"}[header]
            new = owner._replace(view=put(owner.view, txn, seen))
            yield f"{self._who}sees T{txn} {header}", self._with(new)
        if owner.view[txn] in "cav" and not any(x.txn == txn for x in owner.pending):
            new = owner._replace(view=put(owner.view, txn, "-"))
            yield f"{self._who}forgets T{txn}", self._with(new)

    def _rescan(self, txn: int) -> Moves:
        """A6."""
        owner, w = self._owner, self._w
        is_ended = owner.view[txn] == "-" and w.headers[txn] != OPEN
        if not is_ended or not self._is_last or "A6-rescan" in self._broken:
            return
        known = {x.record for x in owner.pending}
        for record in w.records:
            if record.txn == txn and record.epoch <= self._epoch and record not in known:
                found = Pending(txn, record.mask, FREED, record.epoch, record.is_copy)
                new = owner._replace(pending=tuple(sorted((*owner.pending, found))))
                yield f"{self._who}finds a stray record of ended T{txn}", self._with(new)

    def _seek(self) -> Moves:
        """A7: what ended transactions left is finished first."""
        owner, w = self._owner, self._w
        is_settled = w.cursor.fence == self._epoch and owner.memory == owner.durable != 0
        if not w.seeks or not self._is_last or not is_settled:
            return
        if "A7-finish" in self._broken:
            waits = any(x.state == APPLIED for x in owner.pending)
        else:
            waits = any(owner.view[x.txn] in "cav" for x in owner.pending)
        if not waits:
            undone = sum(
                1 << txn
                for txn, outcome in enumerate(w.outcomes)
                if outcome == COMMITTED and w.answered[txn] & owner.memory
            )
            after = self._with(owner._replace(memory=0, durable=0))
            after = after._replace(cursor=Cursor(0, self._epoch), seeks=0, undone=undone)
            yield f"!{self._who}seeks back", after
