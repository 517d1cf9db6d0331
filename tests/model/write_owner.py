"""What one owner of a segment does about writes in transactions: load, append, follow, clean up.

Each rule that can be taken out has a name; the plan's `broken` holds those that are.
"""

from collections.abc import Iterator

from tests.model.group_state import put
from tests.model.write_state import (
    ABORTED,
    ACQUIRED,
    COLLECTED,
    COMMITTED,
    DEAD,
    FENCED,
    FREE,
    OPEN,
    READ,
    RUNNING,
    SCANNED,
    Append,
    Claim,
    Entry,
    Owner,
    Segment,
    World,
    Writing,
)

Moves = Iterator[tuple[str, World]]


class OwnerMoves:
    """What one owner may do next."""

    def __init__(self, plan: Writing, w: World, number: int, epoch: int) -> None:
        self._plan, self._broken, self._w = plan, plan.broken, w
        self._number, self._epoch = number, epoch
        self._segment = w.segments[number]
        self._owner = self._segment.owners[epoch - 1]
        self._who = f"owner {epoch} "
        self._is_last = epoch == len(self._segment.owners)

    def all(self) -> Moves:
        """Faults, the load or what comes after it."""
        may_go = not self._is_last or len(self._segment.owners) < self._plan.owners
        if self._plan.crashes and may_go:
            yield f"!{self._who}crashes", self._stopped()
        if self._owner.phase != RUNNING:
            yield from self._load()
            return
        yield from self._append()
        yield from self._seal()
        for txn in range(self._plan.txns):
            yield from self._send(txn)
            yield from self._check(txn)
            yield from self._follow(txn)
            yield from self._clean(txn)
            yield from self._stray(txn)

    # The world after it

    def _with(self, owner: Owner, segment: Segment | None = None) -> World:
        segment = segment or self._segment
        segment = segment._replace(owners=put(segment.owners, self._epoch - 1, owner))
        return self._w._replace(segments=put(self._w.segments, self._number, segment))

    def _stopped(self) -> World:
        return self._with(self._owner._replace(phase=DEAD, inflight=(), early=()))

    def _seen(self, txn: int, view: str, keys: int | None = None) -> Owner:
        owner = self._owner
        held = owner.keys if keys is None else put(owner.keys, txn, keys)
        return owner._replace(view=put(owner.view, txn, view), keys=held)

    # Load

    def _claims_of(self, txn: int) -> list[Claim]:
        """W6: of epochs up to the own one."""
        newest = FREE if "W6-newer" in self._broken else self._epoch
        return [
            x
            for x in self._w.claims
            if x.txn == txn and x.segment == self._number and x.epoch <= newest
        ]

    def _scanned(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each transaction the epochs of its claims (bits), and the lowest floor."""
        found = [self._claims_of(txn) for txn in range(self._plan.txns)]
        keys = tuple(sum(1 << x.epoch for x in claims) for claims in found)
        return keys, tuple(min([x.floor for x in claims], default=FREE) for claims in found)

    def _aborted_set(self) -> int:
        return sum(1 << txn for txn, mark in enumerate(self._segment.aborted) if mark >= 0)

    def _load(self) -> Moves:
        """W7, W8."""
        owner, who = self._owner, self._who
        if owner.phase == ACQUIRED and self._segment.fence > self._epoch:
            yield f"{who}finds a newer fence, stops", self._stopped()
        elif owner.phase == ACQUIRED and "W7-scan" in self._broken and not owner.early:
            yield (
                f"{who}scans claims before fencing",
                self._with(owner._replace(early=self._scanned())),
            )
        elif owner.phase == ACQUIRED:
            yield from self._fence()
        elif owner.phase == FENCED and "W8-first" in self._broken and not owner.early:
            new = owner._replace(early=((self._aborted_set(),),))
            yield f"{who}reads the aborted set first", self._with(new)
        elif owner.phase == FENCED:
            yield f"{who}scans claims", self._with(self._after_scan())
        elif owner.phase == SCANNED:
            yield f"{who}reads headers", self._with(self._after_headers())
        else:
            skips = owner.skips | (owner.early[0][0] if owner.early else self._aborted_set())
            skips |= self._guessed_aborted()
            view = tuple("c" if x == "x" else x for x in owner.view)
            new = owner._replace(phase=RUNNING, view=view, skips=skips, early=())
            yield f"{who}reads the aborted set, runs", self._with(new)

    def _fence(self) -> Moves:
        """Any number of the appends in flight is recovered, in order."""
        segment = self._segment
        holder = segment.owners[segment.fence - 1]
        base = segment.fence * 8 + self._written(segment.fence) + 1
        held = holder._replace(limit=len(segment.log))
        for count in range(len(holder.inflight) + 1):
            found = tuple(
                Entry(base + at, *append) for at, append in enumerate(holder.inflight[:count])
            )
            new = segment._replace(
                log=segment.log + found,
                fence=self._epoch,
                owners=put(segment.owners, segment.fence - 1, held),
            )
            owner = self._owner._replace(phase=FENCED, confirmed=len(new.log))
            yield f"{self._who}fences, recovers {count} in flight", self._with(owner, new)

    def _after_scan(self) -> Owner:
        owner = self._owner
        is_early = len(owner.early) == 2
        keys, floors = (owner.early[0], owner.early[1]) if is_early else self._scanned()
        if self._plan.watermark:
            floors = tuple(self._segment.watermark if x else FREE for x in keys)
        return owner._replace(
            phase=SCANNED,
            keys=keys,
            view=tuple("?" if x else "-" for x in keys),
            pins=floors,
            early=() if is_early else owner.early,
        )

    def _after_headers(self) -> Owner:
        owner = self._owner
        read = {OPEN: "l", COMMITTED: "c", ABORTED: "a", COLLECTED: "x"}
        view = tuple(
            read[header] if seen == "?" else seen
            for seen, header in zip(owner.view, self._w.headers, strict=True)
        )
        skips = sum(1 << txn for txn, seen in enumerate(view) if seen == "a")
        return owner._replace(phase=READ, view=view, skips=owner.skips | skips)

    def _guessed_aborted(self) -> int:
        """Without W9: what has a claim and no header, or is unknown, is taken for aborted."""
        view, skips = self._owner.view, 0
        if "W9-missing" in self._broken:
            skips |= sum(1 << txn for txn, seen in enumerate(view) if seen == "x")
        if "W9-unknown" in self._broken:
            for txn in {x.txn for x in self._segment.log}:
                if self._w.headers[txn] == COLLECTED and view[txn] == "-":
                    skips |= 1 << txn
        return skips

    # The log

    def _written(self, epoch: int) -> int:
        return sum(1 for x in self._segment.log if x.position // 8 == epoch)

    def _append(self) -> Moves:
        """W4: an append whose outcome cannot be known stops its owner."""
        owner, segment, who = self._owner, self._segment, self._who
        if segment.fence == self._epoch and owner.inflight:
            first = owner.inflight[0]
            position = self._epoch * 8 + self._written(self._epoch) + 1
            new = segment._replace(log=(*segment.log, Entry(position, *first)))
            new_owner = owner._replace(inflight=owner.inflight[1:])
            yield f"{who}: the append of T{first.txn} is durable", self._with(new_owner, new)
        elif segment.fence > self._epoch and owner.inflight:
            if "W4-fenced" in self._broken:
                new_owner = owner._replace(inflight=())
                yield f"{who}takes fenced appends for failed", self._with(new_owner)
            else:
                yield f"{who}learns that it is fenced, stops", self._stopped()
        yield from self._receipt()
        if self._plan.watermark:
            is_wrong = "W13-watermark" in self._broken
            mark = segment.end(owner) if is_wrong else segment.horizon(owner)
            if mark > segment.watermark:
                new = segment._replace(watermark=mark)
                yield f"{who}makes the watermark {mark} durable", self._with(owner, new)

    def _receipt(self) -> Moves:
        owner, segment, w = self._owner, self._segment, self._w
        if owner.confirmed >= min(len(segment.log), owner.limit):
            return
        position, txn, is_copy = segment.log[owner.confirmed]
        view = owner.view[txn]
        if position // 8 != self._epoch or view == "p":
            return
        pins = owner.pins
        if view in "oK" and pins[txn] == FREE:
            pins = put(pins, txn, segment.end(owner))
        after = self._with(owner._replace(confirmed=owner.confirmed + 1, pins=pins))
        if not is_copy:
            after = after._replace(unacked=put(w.unacked, txn, w.unacked[txn] - 1))
        yield f"{self._who}gives a receipt in T{txn}", after

    def _seal(self) -> Moves:
        """W14: nothing is in flight."""
        segment, owner = self._segment, self._owner
        is_quiet = not owner.inflight and owner.confirmed == len(segment.log)
        is_due = self._plan.seals and self._number == 0 and not segment.is_sealed
        if is_due and segment.fence == self._epoch and is_quiet and segment.log:
            yield f"!{self._who}seals", self._with(owner, segment._replace(is_sealed=True))

    # A SEND

    def _waiting(self, txn: int) -> list[bool]:
        sends = self._w.net[txn][self._number]
        return [is_copy for is_copy, count in zip((False, True), sends, strict=True) if count]

    def _taken(self, world: World, txn: int, *, is_copy: bool, is_refused: bool = False) -> World:
        net = world.net[txn]
        left = net[self._number].without(is_copy=is_copy)
        new = world._replace(net=put(world.net, txn, put(net, self._number, left)))
        if is_refused and not is_copy:
            new = new._replace(failed=put(new.failed, txn, True))
        return new

    def _send(self, txn: int) -> Moves:
        w, owner, view = self._w, self._owner, self._owner.view[txn]
        waiting = self._waiting(txn)
        if waiting and self._segment.is_sealed:
            for is_copy in waiting:
                after = self._taken(w, txn, is_copy=is_copy)
                child = after.net[txn][1].plus(is_copy=is_copy)
                after = after._replace(net=put(after.net, txn, put(after.net[txn], 1, child)))
                yield f"{self._who}refuses T{txn}: sealed; it is sent to the child", after
        elif waiting and view in "-l":
            yield from self._first_send(txn, waiting)
        elif waiting and view == "o":
            for is_copy in waiting:
                inflight = (*owner.inflight, Append(txn, is_copy))
                after = self._with(owner._replace(inflight=inflight))
                label = f"{self._who}issues an append of T{txn}"
                yield label, self._taken(after, txn, is_copy=is_copy)
        elif waiting and view in "cab":
            yield from self._refused(w, txn, waiting, "it has ended")
        if view in "hp":
            yield self._claim(txn, "o")

    def _refused(self, world: World, txn: int, waiting: list[bool], why: str) -> Moves:
        for is_copy in waiting:
            after = self._taken(world, txn, is_copy=is_copy, is_refused=True)
            yield f"{self._who}refuses T{txn}: {why}", after

    def _first_send(self, txn: int, waiting: list[bool]) -> Moves:
        """W1, W2, W3: the own claim first, whatever was loaded."""
        w, owner, view = self._w, self._owner, self._owner.view[txn]
        is_open = w.headers[txn] == OPEN
        if self._plan.by_coordinator:
            yield from self._trust(txn, waiting)
            return
        guesses = view == "-" and ("W1-parallel" in self._broken or "W2-cached" in self._broken)
        if view == "l" and "W3-loaded" in self._broken:
            yield (
                f"{self._who}takes the loaded claim of T{txn} for its own",
                self._with(self._seen(txn, "o")),
            )
        elif guesses and not is_open:
            yield from self._refused(w, txn, waiting, "its header says that it has ended")
        elif guesses and "W2-cached" in self._broken:
            yield f"{self._who}reads that T{txn} is open", self._with(self._seen(txn, "h"))
        elif guesses:
            inflight = (*owner.inflight, Append(txn, waiting[0]))
            after = self._with(self._seen(txn, "p")._replace(inflight=inflight))
            label = f"{self._who}reads that T{txn} is open, issues append and claim together"
            yield label, self._taken(after, txn, is_copy=waiting[0])
        else:
            yield self._claim(txn, "J" if view == "-" else "K")

    def _trust(self, txn: int, waiting: list[bool]) -> Moves:
        """The claim is the coordinator's: the header is read at the first SEND."""
        is_open = self._w.headers[txn] == OPEN
        if is_open or "C2-header" in self._broken:
            new = self._seen(txn, "o", self._owner.keys[txn] | 1)
            told = "reads that T{} is open" if is_open else "trusts the coordinator about T{}"
            yield self._who + told.format(txn), self._with(new)
        elif self._owner.view[txn] == "-":
            yield from self._refused(self._w, txn, waiting, "it has ended")

    def _claim(self, txn: int, view: str) -> tuple[str, World]:
        """W13: its value is the floor, the last position that was issued."""
        issued = self._written(self._epoch) + len(self._owner.inflight)
        claim = Claim(txn, self._number, self._epoch, self._epoch * 8 + issued)
        after = self._with(self._seen(txn, view, self._owner.keys[txn] | 1 << self._epoch))
        claims = tuple(sorted({*self._w.claims, claim}))
        return f"{self._who}puts a claim of T{txn}", after._replace(claims=claims)

    def _check(self, txn: int) -> Moves:
        """W2: one read of the header after the claim."""
        view, who = self._owner.view[txn], self._who
        if view in "JK" and self._w.headers[txn] == OPEN:
            label = f"{who}reads that T{txn} is open, after its claim"
            yield label, self._with(self._seen(txn, "o"))
        elif view == "J":
            refused, waiting = self._with(self._seen(txn, "r")), self._waiting(txn)
            why = "its header, read after the claim, says that it has ended"
            if waiting:
                yield from self._refused(refused, txn, waiting, why)
            else:
                yield f"{who}refuses T{txn}: {why}", refused
        elif view == "r":
            mine = (txn, self._number, self._epoch)
            left = tuple(x for x in self._w.claims if x[:3] != mine)
            after = self._with(self._seen(txn, "-", 0))._replace(claims=left)
            yield f"{who}deletes its refused claim of T{txn}", after

    # An end

    def _follow(self, txn: int) -> Moves:
        """W9: of what is in memory and has no header the aborted record tells the end."""
        header, owner = self._w.headers[txn], self._owner
        if owner.view[txn] not in "loK" or header == OPEN:
            return
        is_aborted = header == ABORTED or (header == COLLECTED and self._segment.aborted[txn] >= 0)
        new = self._seen(txn, "a" if is_aborted else "c")
        skips = owner.skips | (1 << txn if is_aborted else 0)
        new = new._replace(pins=put(owner.pins, txn, FREE), skips=skips)
        yield f"{self._who}sees T{txn} {header}", self._with(new)

    def _clean(self, txn: int) -> Moves:
        """W4, W5: the abort is recorded, then the claims go."""
        owner, view = self._owner, self._owner.view[txn]
        if view in "cb":
            yield from self._forget(txn)
        elif view == "d":
            yield self._record(txn, "-")
        elif view == "a":
            mine = self._segment.log[owner.confirmed : owner.limit]
            waits = any(x.txn == txn for x in owner.inflight) or any(
                x.txn == txn and x.position // 8 == self._epoch for x in mine
            )
            if waits and "W4-wait" not in self._broken:
                return
            if "W5-order" in self._broken:
                known = self._known(txn)
                left = tuple(x for x in self._w.claims if x not in known)
                after = self._with(self._seen(txn, "d", 0))._replace(claims=left)
                yield f"{self._who}deletes the claims of T{txn}", after
            else:
                yield self._record(txn, "b")

    def _record(self, txn: int, view: str) -> tuple[str, World]:
        segment = self._segment
        mark = segment.end(self._owner)
        if "W5-blind" not in self._broken:
            mark = max(mark, segment.aborted[txn])
        new = segment._replace(aborted=put(segment.aborted, txn, mark))
        label = f"{self._who}records that T{txn} is aborted up to {mark}"
        return label, self._with(self._seen(txn, view), new)

    def _known(self, txn: int) -> list[Claim]:
        """W6: by the exact key."""
        known = self._owner.keys[txn]
        return [
            x
            for x in self._w.claims
            if x.txn == txn
            and x.segment == self._number
            and (known >> x.epoch & 1 or "W6-all" in self._broken)
        ]

    def _forget(self, txn: int) -> Moves:
        known = self._known(txn)
        if known:
            left = tuple(x for x in self._w.claims if x != known[0])
            label = f"{self._who}deletes the claim of T{txn} of owner {known[0].epoch}"
            yield label, self._w._replace(claims=left)
        else:
            yield f"{self._who}forgets T{txn}", self._with(self._seen(txn, "-", 0))

    def _stray(self, txn: int) -> Moves:
        """W11."""
        header, owner = self._w.headers[txn], self._owner
        is_asked = self._is_last and "W11-rescan" not in self._broken
        if owner.view[txn] != "-" or header == OPEN or not is_asked:
            return
        strange = sum(
            1 << x.epoch for x in self._claims_of(txn) if not owner.keys[txn] >> x.epoch & 1
        )
        if strange:
            is_aborted = header == ABORTED or (header == COLLECTED and "W9-missing" in self._broken)
            new = self._seen(txn, "a" if is_aborted else "c", strange)
            new = new._replace(skips=owner.skips | (1 << txn if is_aborted else 0))
            yield f"{self._who}finds a stray claim of ended T{txn}", self._with(new)
