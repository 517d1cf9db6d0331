"""The model of a segment that attempts of one group write to, under an owner and the one after it.

The rules of writes (W) hold of attempts as of transactions; what an attempt's state is follows from
the header of its group.  That header moves as `groups` shows that it does: indexes are reserved,
then one write commits it with winners, or aborts it.

Views that an owner has of an attempt: `-` none, `l` loaded open, `J` and `K` claim durable (`K`:
one was loaded) and the header to be read, `o` joined, `r` refused, `c` committed, `a` aborted, `b`
aborted and recorded; while it loads `?` found by the scan, `x` found without header.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.group_requests import Broken
from tests.model.group_state import ABORTED, COMMITTED, OPEN, put

COLLECTED = "X"
FREE = 99
"""A pin that holds nothing back."""
ACQUIRED, FENCED, SCANNED, READ, RUNNING, DEAD = range(6)


class Claim(NamedTuple):
    """Of an attempt, by the owner of that epoch, made when `floor` was the last position issued."""

    attempt: int
    epoch: int
    floor: int


class Owner(NamedTuple):
    """One incarnation.  Of each attempt: view, epochs of the claims it knows (bits), pin."""

    phase: int
    view: tuple[str, ...]
    keys: tuple[int, ...]
    pins: tuple[int, ...]
    inflight: tuple[int, ...] = ()
    confirmed: int = 0
    limit: int = FREE
    skips: int = 0


class Segment(NamedTuple):
    """Everything.  Positions in the log are epoch * 8 + index."""

    state: str
    winners: int
    todo: tuple[int, ...]
    unacked: tuple[int, ...]
    failed: tuple[int, ...]
    net: tuple[int, ...]
    claims: tuple[Claim, ...]
    listed: bool
    log: tuple[tuple[int, int], ...]
    fence: int
    aborted: tuple[int, ...]
    owners: tuple[Owner, ...]


@dataclass(frozen=True)
class Writing:
    """What happens in a run; `keeps_stale`: a replaced owner may go on."""

    attempts: int = 2
    owners: int = 2
    sends: int = 1
    keeps_stale: bool = True
    broken: Broken = field(default_factory=frozenset)


def fresh_owner(attempts: int, phase: int) -> Owner:
    """One that knows nothing."""
    return Owner(phase, ("-",) * attempts, (0,) * attempts, (FREE,) * attempts)


class Segments:
    """See the module's rules."""

    def __init__(self, plan: Writing) -> None:
        self.plan = plan
        self._all = range(plan.attempts)

    def start(self) -> Segment:
        """Every attempt has its index."""
        count = self.plan.attempts
        zeros = (0,) * count
        return Segment(
            OPEN,
            0,
            (self.plan.sends,) * count,
            zeros,
            zeros,
            zeros,
            (),
            False,
            (),
            1,
            (-1,) * count,
            (fresh_owner(count, RUNNING),),
        )

    def outcome(self, s: Segment, attempt: int) -> str:
        """How it has ended, whatever is left that tells; "" while it is open."""
        if s.state == OPEN:
            return ""
        return COMMITTED if s.winners >> attempt & 1 else ABORTED

    def projected(self, s: Segment, attempt: int) -> str:
        """G1: the state of an attempt, by the header."""
        if s.state == COMMITTED and "G1-winners" in self.plan.broken:
            return COMMITTED
        if s.state == COMMITTED and not s.winners >> attempt & 1:
            return OPEN if "G1-losers" in self.plan.broken else ABORTED
        return s.state

    # Promises

    @staticmethod
    def horizon(s: Segment, owner: Owner) -> int:
        """Up to where that owner delivers."""
        end = s.log[owner.confirmed - 1][0] if owner.confirmed else 0
        held = [p for v, p in zip(owner.view, owner.pins, strict=True) if v in "lKo"]
        return min([end, *held])

    def wrong(self, s: Segment) -> str | None:
        """What owners deliver is committed, what they skip aborted, and something speaks for it."""
        for number, owner in enumerate(s.owners):
            if owner.phase != RUNNING:
                continue
            horizon = self.horizon(s, owner)
            for position, attempt in s.log[: owner.confirmed]:
                if position > horizon:
                    break
                skips, out = owner.skips >> attempt & 1, self.outcome(s, attempt)
                if out != (ABORTED if skips else COMMITTED):
                    does = "skips" if skips else "delivers"
                    return f"owner {number + 1} {does} attempt {attempt}: {out or 'open'}"
        for position, attempt in s.log:
            covered = s.aborted[attempt] >= position or any(x.attempt == attempt for x in s.claims)
            if not covered and self.outcome(s, attempt) == ABORTED:
                return f"nothing speaks for an entry of aborted attempt {attempt}"
        return None

    def broken(self, before: Segment, after: Segment) -> str | None:
        """Horizons stay or rise."""
        for number, (was, owner) in enumerate(zip(before.owners, after.owners, strict=False)):
            is_running = was.phase == owner.phase == RUNNING
            if is_running and self.horizon(after, owner) < self.horizon(before, was):
                return f"the horizon of owner {number + 1} moved back"
        return None

    def unfinished(self, s: Segment) -> str | None:
        """Nothing is left, and everything is shown or skipped as it ended."""
        if s.state != COLLECTED:
            return "the header is not collected"
        if s.claims:
            return f"claims are left: {[tuple(x) for x in s.claims]}"
        owner = s.owners[-1]
        if owner.phase != RUNNING:
            return "nobody runs the segment"
        if s.log and self.horizon(s, owner) != s.log[-1][0]:
            return "the horizon is stuck"
        return None

    # Moves

    def moves(self, s: Segment) -> Iterator[tuple[str, Segment]]:
        """Of the group, the clients, the collector, the owners."""
        yield from self._group(s)
        for attempt in self._all:
            if s.todo[attempt] and not s.failed[attempt] and s.state == OPEN:
                yield (
                    f"attempt {attempt} sends",
                    s._replace(
                        todo=put(s.todo, attempt, s.todo[attempt] - 1),
                        unacked=put(s.unacked, attempt, s.unacked[attempt] + 1),
                        net=put(s.net, attempt, s.net[attempt] + 1),
                    ),
                )
        if len(s.owners) < self.plan.owners:
            is_dead = s.owners[-1].phase == DEAD
            if is_dead or self.plan.keeps_stale:
                new = fresh_owner(self.plan.attempts, ACQUIRED)
                label = "" if is_dead else "!"
                label += f"owner {len(s.owners) + 1} acquires the segment"
                yield label, s._replace(owners=(*s.owners, new))
        for number, owner in enumerate(s.owners):
            if owner.phase != DEAD:
                yield from _OwnerMoves(self, s, number).all()

    def _group(self, s: Segment) -> Iterator[tuple[str, Segment]]:
        if s.state == OPEN:
            for attempt in self._all:
                if s.todo[attempt] or s.unacked[attempt] or s.failed[attempt]:
                    continue
                won = s._replace(state=COMMITTED, winners=1 << attempt)
                yield f"the group commits with {attempt}", won
            yield "the group aborts", s._replace(state=ABORTED)
        elif s.state != COLLECTED and not s.listed and not self._records(s):
            yield "the collector lists no records", s._replace(listed=True)
        elif s.state != COLLECTED and s.listed:
            yield "the collector deletes the header", s._replace(state=COLLECTED)

    def _records(self, s: Segment) -> bool:
        """G9: records of any attempt of the group."""
        if "G9-listing" in self.plan.broken:
            return False  # only those under the group's own number
        if "G9-winners" in self.plan.broken:
            return any(s.winners >> x.attempt & 1 for x in s.claims)
        return bool(s.claims)


class _OwnerMoves:
    """What one owner may do next."""

    def __init__(self, model: Segments, s: Segment, number: int) -> None:
        self._model, self._plan, self._s = model, model.plan, s
        self._number, self._epoch = number, number + 1
        self._owner = s.owners[number]
        self._who = f"owner {number + 1} "

    def _with(self, owner: Owner) -> Segment:
        return self._s._replace(owners=put(self._s.owners, self._number, owner))

    def _seen(self, attempt: int, view: str, keys: tuple[int, ...] | None = None) -> Owner:
        owner = self._owner
        keys = owner.keys if keys is None else keys
        return owner._replace(view=put(owner.view, attempt, view), keys=keys)

    def all(self) -> Iterator[tuple[str, Segment]]:
        """Fault, load, appends, and each attempt."""
        s, owner, who = self._s, self._owner, self._who
        is_last = self._number == len(s.owners) - 1
        if not is_last or len(s.owners) < self._plan.owners:
            dead = owner._replace(phase=DEAD, inflight=())
            yield f"!{who}crashes", self._with(dead)
        if owner.phase != RUNNING:
            yield from self._load()
            return
        yield from self._append()
        for attempt in range(self._plan.attempts):
            yield from self._attempt(attempt)

    def _load(self) -> Iterator[tuple[str, Segment]]:
        s, owner, who, everyone = self._s, self._owner, self._who, range(self._plan.attempts)
        if owner.phase == ACQUIRED and s.fence > self._epoch:
            yield f"{who}is fenced", self._with(owner._replace(phase=DEAD))
        elif owner.phase == ACQUIRED:
            holder = s.owners[s.fence - 1]
            base = sum(1 for x in s.log if x[0] // 8 == s.fence)
            for count in range(len(holder.inflight) + 1):
                found = tuple(
                    (s.fence * 8 + base + 1 + at, holder.inflight[at]) for at in range(count)
                )
                log = s.log + found
                owners = put(s.owners, s.fence - 1, holder._replace(limit=len(s.log)))
                new = owner._replace(phase=FENCED, confirmed=len(log))
                owners = put(owners, self._number, new)
                fenced = s._replace(log=log, fence=self._epoch, owners=owners)
                yield f"{who}fences, recovers {count} in flight", fenced
        elif owner.phase == FENCED:
            found_claims = [[x for x in s.claims if x.attempt == t] for t in everyone]
            new = owner._replace(
                phase=SCANNED,
                keys=tuple(
                    sum(1 << x.epoch for x in xs if x.epoch <= self._epoch) for xs in found_claims
                ),
                view=tuple("?" if xs else "-" for xs in found_claims),
                pins=tuple(min([x.floor for x in xs], default=FREE) for xs in found_claims),
            )
            yield f"{who}scans claims", self._with(new)
        elif owner.phase == SCANNED:
            seen = {OPEN: "l", COMMITTED: "c", ABORTED: "a", COLLECTED: "x"}
            view = tuple(
                seen[self._model.projected(s, t)] if owner.view[t] == "?" else owner.view[t]
                for t in everyone
            )
            skips = sum(1 << t for t in everyone if view[t] == "a")
            new = owner._replace(phase=READ, view=view, skips=skips)
            yield f"{who}reads the header", self._with(new)
        else:
            skips = sum(1 << t for t in everyone if s.aborted[t] >= 0)
            view = tuple("c" if x == "x" else x for x in owner.view)
            new = owner._replace(phase=RUNNING, view=view, skips=owner.skips | skips)
            yield f"{who}reads the aborted set, runs", self._with(new)

    def _end(self) -> int:
        s, owner = self._s, self._owner
        return s.log[owner.confirmed - 1][0] if owner.confirmed else 0

    def _append(self) -> Iterator[tuple[str, Segment]]:
        s, owner, who = self._s, self._owner, self._who
        if s.fence == self._epoch and owner.inflight:
            position = self._epoch * 8 + sum(1 for x in s.log if x[0] // 8 == self._epoch) + 1
            first = owner.inflight[0]
            done = self._with(owner._replace(inflight=owner.inflight[1:]))
            done = done._replace(log=(*s.log, (position, first)))
            yield f"{who}: the append of {first} is durable", done
        elif s.fence > self._epoch and owner.inflight:
            dead = owner._replace(phase=DEAD, inflight=())
            yield f"{who}learns that it is fenced", self._with(dead)
        if owner.confirmed < min(len(s.log), owner.limit):
            position, attempt = s.log[owner.confirmed]
            if position // 8 == self._epoch:
                pins = owner.pins
                if owner.view[attempt] in "oK" and pins[attempt] == FREE:
                    pins = put(pins, attempt, self._end())
                told = self._with(owner._replace(confirmed=owner.confirmed + 1, pins=pins))
                left = put(s.unacked, attempt, s.unacked[attempt] - 1)
                yield f"{who}gives attempt {attempt} its receipt", told._replace(unacked=left)

    def _attempt(self, t: int) -> Iterator[tuple[str, Segment]]:
        s, who, view = self._s, self._who, self._owner.view[t]
        state = self._model.projected(s, t)
        if s.net[t]:
            yield from self._send(t)
        if view in "JK":
            yield from self._check(t, state)
        if view == "r":
            keys = put(self._owner.keys, t, 0)
            mine = tuple(x for x in s.claims if (x.attempt, x.epoch) != (t, self._epoch))
            yield (
                f"{who}deletes its refused claim of {t}",
                self._with(self._seen(t, "-", keys))._replace(claims=mine),
            )
        if view in "loK" and state != OPEN:
            is_aborted = state == ABORTED or (state == COLLECTED and s.aborted[t] >= 0)
            skips = self._owner.skips | (1 << t if is_aborted else 0)
            pins = put(self._owner.pins, t, FREE)
            new = self._seen(t, "a" if is_aborted else "c")._replace(pins=pins, skips=skips)
            yield f"{who}sees attempt {t} {state}", self._with(new)
        if view in "ab":
            yield from self._clean(t)
        elif view == "c":
            yield from self._forget(t)
        elif view == "-":
            yield from self._stray(t, state)

    def _send(self, t: int) -> Iterator[tuple[str, Segment]]:
        s, owner, who = self._s, self._owner, self._who
        taken = put(s.net, t, s.net[t] - 1)
        view = owner.view[t]
        if view in "-l":
            issued = sum(1 for x in s.log if x[0] // 8 == self._epoch) + len(owner.inflight)
            claim = Claim(t, self._epoch, self._epoch * 8 + issued)
            keys = put(owner.keys, t, owner.keys[t] | 1 << self._epoch)
            new = self._with(self._seen(t, "J" if view == "-" else "K", keys))
            claims = tuple(sorted({*s.claims, claim}))
            yield f"{who}puts a claim of {t}", new._replace(claims=claims)
        elif view == "o":
            new = self._with(owner._replace(inflight=(*owner.inflight, t)))
            yield f"{who}issues an append of {t}", new._replace(net=taken)
        elif view in "cab":
            yield f"{who}refuses {t}", s._replace(net=taken, failed=put(s.failed, t, 1))

    def _check(self, t: int, state: str) -> Iterator[tuple[str, Segment]]:
        """W2, in the partition of the group: a claim elsewhere is no guard against an old read."""
        s, who = self._s, self._who
        if state == OPEN or "G9-partition" in self._plan.broken:
            yield f"{who}reads that {t} is open, after its claim", self._with(self._seen(t, "o"))
        if state != OPEN and self._owner.view[t] == "J":
            taken = put(s.net, t, max(0, s.net[t] - 1))
            refused = self._with(self._seen(t, "r"))
            refused = refused._replace(net=taken, failed=put(s.failed, t, 1))
            yield f"{who}reads that {t} has ended, refuses", refused

    def _clean(self, t: int) -> Iterator[tuple[str, Segment]]:
        """W4, W5."""
        s, owner = self._s, self._owner
        if owner.view[t] == "b":
            yield from self._forget(t)
            return
        mine = s.log[owner.confirmed : owner.limit]
        waits = t in owner.inflight or any(x[1] == t and x[0] // 8 == self._epoch for x in mine)
        if not waits:
            aborted = put(s.aborted, t, max(s.aborted[t], self._end()))
            new = self._with(self._seen(t, "b"))._replace(aborted=aborted)
            yield f"{self._who}records that {t} is aborted", new

    def _forget(self, t: int) -> Iterator[tuple[str, Segment]]:
        """W6: what it knows, one by one, then the attempt."""
        s, owner = self._s, self._owner
        known = [x for x in s.claims if x.attempt == t and owner.keys[t] >> x.epoch & 1]
        if "G9-shared" in self._plan.broken:
            known = [x for x in s.claims if x.epoch == self._epoch]
        if known:
            left = tuple(x for x in s.claims if x not in known[:1])
            label = f"{self._who}deletes the claim of {known[0].attempt}, epoch {known[0].epoch}"
            yield label, s._replace(claims=left)
            return
        new = self._seen(t, "-", put(owner.keys, t, 0))
        yield f"{self._who}forgets {t}", self._with(new)

    def _stray(self, t: int, state: str) -> Iterator[tuple[str, Segment]]:
        """W11."""
        s, owner = self._s, self._owner
        if state == OPEN or self._number != len(s.owners) - 1:
            return
        strange = sum(
            1 << x.epoch
            for x in s.claims
            if x.attempt == t and x.epoch <= self._epoch and not owner.keys[t] >> x.epoch & 1
        )
        if strange:
            is_aborted = state == ABORTED
            skips = owner.skips | (1 << t if is_aborted else 0)
            keys = put(owner.keys, t, strange)
            new = self._seen(t, "a" if is_aborted else "c", keys)._replace(skips=skips)
            yield f"{self._who}finds a stray claim of {t}", self._with(new)
