"""The model of consumers in order: what is lost, refused without reason, or never comes.

The consumer, its transactions and faults, and what is promised; what the owner does is in
`order_owner`.
"""

from collections.abc import Iterator

from tests.model.group_state import put
from tests.model.order_owner import OrderOwner, heard
from tests.model.order_state import (
    ABORT_TOLD,
    ABORTED,
    COMMIT_TOLD,
    COMMITTED,
    DOOMED,
    HELD,
    LOST,
    NEW,
    NOBODY,
    OPEN,
    SENT,
    AckInTxn,
    Answer,
    Client,
    Habit,
    Message,
    Ordering,
    Owner,
    PlainAck,
    Redeliver,
    World,
)

Moves = Iterator[tuple[str, World]]
ENDED = COMMIT_TOLD + ABORT_TOLD


class Ordered:
    """See the module's rules."""

    def __init__(self, plan: Ordering) -> None:
        self.plan = plan
        self._txns = range(plan.txns)
        self._owner = OrderOwner(plan)

    def start(self) -> World:
        """Everything is to be delivered."""
        count = self.plan.txns
        none = (0,) * count
        return World(
            headers=(OPEN,) * count,
            known=(NEW,) * count,
            within=none,
            of=none,
            done=0,
            client=Client(),
            up=(),
            down=(),
            owner=Owner(),
            left=self.plan.left,
        )

    # Promises

    def wrong(self, w: World) -> str | None:
        """What is acknowledged was processed in something that lasts, and once."""
        lost = w.owner.cursor & ~w.done
        may_seek = self.plan.left.seek
        if lost and may_seek and not w.left.seek and self.plan.judges != "conflict":
            return f"a seek is undone: entries {lost:b} are acknowledged again"
        taken = 0
        for txn in self._txns:
            if w.headers[txn] == COMMITTED and not may_seek:
                if taken & w.within[txn]:
                    return "an entry was processed in two transactions that committed"
                taken |= w.within[txn]
        if lost and self.plan.judges != "conflict":
            return f"entries {lost:b} are lost: acknowledged, and processed in nothing that lasts"
        return None

    def broken(self, before: World, after: World) -> str | None:
        """No acknowledgement is refused because of a transaction whose END was answered."""
        return after.problem or None

    def unfinished(self, w: World) -> str | None:
        """Every entry is acknowledged or with the consumer."""
        if w.owner.holds or w.up or w.down:
            return "holds are left, or something is on the wire"
        stuck = (1 << self.plan.entries) - 1 & ~w.owner.cursor & ~w.client.hand
        return f"entries {stuck:b} never come" if stuck else None

    # Moves

    def moves(self, w: World) -> Moves:
        """Of the consumer, of its transactions, of the wire; faults; of the owner."""
        yield from self._ack(w)
        for txn in self._txns:
            yield from self._end(w, txn)
        if w.down:
            yield from self._receive(w)
        yield from self._faults(w)
        yield from self._seek(w)
        yield from self._owner.moves(w)

    def _back(self, w: World) -> World:
        """The client drops what it has and asks for redelivery."""
        if self.plan.habit is Habit.DEAF:
            return w
        epoch = w.client.epoch + 1 if self.plan.has_epochs else w.client.epoch
        return w._replace(client=Client(w.client.who, epoch), up=(*w.up, Redeliver(epoch)))

    def _ack(self, w: World) -> Moves:
        client = w.client
        if not client.hand:
            return
        mine = [x for x, of in zip(w.known, w.of, strict=True) if x != NEW and of == client.who]
        is_alone = all(x in ENDED for x in mine)
        may = is_alone or (self.plan.pipelines and all(x in ENDED + HELD for x in mine))
        txn = w.known.index(NEW) if NEW in w.known else None
        is_single = self.plan.single_first and txn == 0
        emptied = client._replace(hand=0, last=0)
        if txn is not None and may and (not is_single or client.hand == 1 << client.last - 1):
            does = "only" if is_single else "up to"
            yield (
                f"consumer {client.who} acknowledges {does} {client.last} in T{txn}",
                w._replace(
                    known=put(w.known, txn, SENT),
                    within=put(w.within, txn, client.hand),
                    of=put(w.of, txn, client.who),
                    client=emptied,
                    up=(*w.up, AckInTxn(txn, client.last, is_alone)),
                ),
            )
        if w.left.plain and is_alone:
            yield (
                f"consumer {client.who} acknowledges up to {client.last} plainly",
                w._replace(
                    done=w.done | client.hand,
                    client=emptied,
                    up=(*w.up, PlainAck(client.last)),
                    left=w.left._replace(plain=w.left.plain - 1),
                ),
            )

    def _end(self, w: World, txn: int) -> Moves:
        known, header, is_mine = w.known[txn], w.headers[txn], w.of[txn] == w.client.who
        if known in HELD + LOST or (known in SENT + DOOMED and not is_mine):
            everything = (w.client.hand | w.within[txn]) >> self.plan.entries - 1 & 1
            waits = self.plan.batches and known == HELD and not everything
            told = w._replace(known=put(w.known, txn, ABORT_TOLD))
            told = self._back(told) if is_mine else told
            if header == OPEN and known == HELD and not waits:
                yield (
                    f"T{txn} COMMIT, answered",
                    w._replace(
                        headers=put(w.headers, txn, COMMITTED),
                        known=put(w.known, txn, COMMIT_TOLD),
                        done=w.done | w.within[txn],
                    ),
                )
            if header == OPEN and not waits:
                aborted = told._replace(headers=put(w.headers, txn, ABORTED))
                yield f"T{txn} ABORT, answered", aborted
            elif header != OPEN:
                yield f"T{txn}: answered that it is aborted already", told
        if w.left.deadline and header == OPEN and known in SENT + DOOMED + HELD + LOST:
            left = w.left._replace(deadline=w.left.deadline - 1)
            aborted = w._replace(headers=put(w.headers, txn, ABORTED), left=left)
            yield f"!the deadline aborts T{txn}", aborted

    def _receive(self, w: World) -> Moves:
        client, first = w.client, w.down[0]
        w = w._replace(down=w.down[1:])
        is_careful = self.plan.habit is Habit.CAREFUL
        if isinstance(first, Answer):
            known = w.known[first.txn]
            if known in SENT + DOOMED:
                known = HELD if first.is_taken and known == SENT else LOST
            told = "taken" if first.is_taken else "refused"
            after = w._replace(known=put(w.known, first.txn, known))
            yield f"consumer hears that T{first.txn}'s acknowledgement is {told}", after
        elif first.epoch < client.epoch:
            yield f"consumer drops {first.entry}, of an old epoch", w
        elif is_careful and first.entry <= client.furthest:
            doomed = {SENT: DOOMED, HELD: LOST}
            known_now = tuple(
                doomed.get(x, x) if of == client.who else x
                for x, of in zip(w.known, w.of, strict=True)
            )
            after = self._back(w._replace(known=known_now))
            yield f"consumer sees {first.entry} again, goes back", after
        else:
            yield f"consumer {client.who} gets {first.entry}", self._got(w, first)

    def _got(self, w: World, message: Message) -> World:
        entry = message.entry
        new = w.client._replace(
            hand=w.client.hand | 1 << entry - 1,
            last=entry,
            furthest=entry if self.plan.habit is Habit.CAREFUL else 0,
        )
        return w._replace(client=new)

    # Faults

    @staticmethod
    def _attached(w: World, who: int, owner: Owner) -> World:
        """A consumer attaches, with nothing on the wire and acknowledgements that nobody told."""
        lost = {SENT: LOST, DOOMED: LOST}
        client = Client(who, w.client.epoch)
        owner = Owner(owner.cursor, owner.holds, epoch=client.epoch)
        known = tuple(lost.get(x, x) for x in w.known)
        return w._replace(known=known, client=client, up=(), down=(), owner=owner)

    def _faults(self, w: World) -> Moves:
        left, who = w.left, w.client.who
        if left.cut:
            after = self._attached(w, who, w.owner)._replace(left=left._replace(cut=left.cut - 1))
            yield "!the connection is lost, the consumer attaches again", after
        if left.load:
            after = self._attached(w, who, self._loaded(w))
            after = after._replace(left=left._replace(load=left.load - 1))
            yield "!another owner loads", after
        if left.failover:
            after = self._attached(w, 1, w.owner)
            after = after._replace(left=left._replace(failover=left.failover - 1))
            yield "!consumer 1 takes over", after

    def _loaded(self, w: World) -> Owner:
        """A9: whose the holds are a load cannot tell, unless their records say it."""
        rules, owner = self.plan.rules, w.owner
        holds = owner.holds
        if "loaded-own" in rules:
            holds = tuple(x._replace(who=w.client.who) for x in holds)
        elif "record-who" not in rules:
            holds = tuple(x._replace(who=NOBODY) for x in holds)
        owner = owner._replace(holds=holds)
        for txn in self._txns:
            if w.headers[txn] != OPEN:
                owner = heard(w.headers, owner, txn)
        return owner

    def _seek(self, w: World) -> Moves:
        """A8: what has ended is finished first, by what headers say now."""
        holds = w.owner.holds
        waits = "A8-seek" in self.plan.rules and any(w.headers[x.txn] != OPEN for x in holds)
        if not w.left.seek or not w.owner.cursor or waits:
            return
        after = self._attached(w, w.client.who, w.owner._replace(cursor=0))
        within = w.within
        for hold in holds:
            if w.headers[hold.txn] == OPEN:
                within = put(within, hold.txn, within[hold.txn] | hold.entries)
        left = w.left._replace(seek=w.left.seek - 1)
        yield "!a seek to the start", after._replace(done=0, within=within, left=left)
