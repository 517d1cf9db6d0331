"""The model of groups: drivers with tasks, leaders, lost answers, late copies, the collector.

Driver 0 has the key at epoch 0 when a run begins.  Driver 1 opens it at any time, and does again
what driver 0 was not told is committed.  Driver 0 may be frozen before any of its moves, and goes
on later.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model import group_promises
from tests.model.group_requests import Broken, advance
from tests.model.group_state import (
    ABORTED,
    COMMITTED,
    NONE,
    OPEN,
    Answer,
    Attempt,
    Batch,
    Driver,
    Key,
    Request,
    World,
    put,
)

PLAIN = -1


class Work(NamedTuple):
    """A batch, and how many attempts at its one task there are; PLAIN: a plain transaction."""

    batch: Batch
    attempts: int = 1


@dataclass(frozen=True)
class Plan:
    """What happens in a run."""

    work: tuple[tuple[Work, ...], tuple[Work, ...]]
    """Of each driver; the second one begins after what the first was told is committed."""
    leaders: int = 1
    faults: int = 0
    """Answers that are lost, and crashes of a leader, together."""
    copies: int = 0
    """Requests that the network delivers again, at any time."""
    collects: bool = False
    again: int = 0
    """How often a driver tries a batch that failed again, under the same epoch."""
    older: int = 0
    """How many batches before that the second driver may begin."""
    hints: bool = False
    """BEGIN_ATTEMPT says what batch it is for."""
    extends: bool = False
    attaches: bool = False
    """The second driver has the epoch of the first, and opens nothing."""
    forges: bool = False
    """A client writes under an index that it was not given."""
    misnames: bool = False
    """The driver names a winner that it was not given."""
    operator: bool = False
    """An operator commits a group by hand."""
    deadlines: bool = True
    broken: Broken = field(default_factory=frozenset)


class Groups:
    """See the module's rules."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._attempts = max((w.attempts for x in plan.work for w in x), default=1)
        self._attempts = max(1, self._attempts)
        self._turns = [len(x) + plan.again for x in plan.work]
        self._first = [0, self._turns[0] * self._attempts]
        """Of each driver's attempts."""
        count = sum(self._turns) * self._attempts
        self._copy, self._collector = 2 + count, 3 + count
        self._slots = 4 + count

    def start(self) -> World:
        """Driver 0 has epoch 0."""
        drivers = (Driver("run", 0), Driver("new"))
        if self.plan.attaches:
            drivers = (drivers[0], Driver("run", 0))
        if not self.plan.work[1]:
            drivers = (drivers[0], Driver("over"))
        return World(
            Key(0, 0),
            (),
            (None,) * self._slots,
            drivers,
            (Attempt(),) * (self._slots - 4),
            ((NONE, 0, 0),) * self.plan.leaders,
            faults=self.plan.faults,
            copies=self.plan.copies,
        )

    def broken(self, before: World, after: World) -> str | None:
        """See `group_promises`."""
        return group_promises.broken(before, after, self.plan.broken)

    def wrong(self, world: World) -> str | None:
        """Nothing more: `broken` asks of each state what the move to it has changed."""
        return None

    def unfinished(self, world: World) -> str | None:
        """All that ended is collected, where there is a collector."""
        if self.plan.collects and any(not x.gone for x in world.headers):
            return "a header is left"
        if any(x.state == OPEN for x in world.headers) and self.plan.deadlines:
            return "a group is open for ever"
        return None

    # Moves

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Of requests at their leaders, drivers, deadlines, the collector, faults."""
        for slot, request in enumerate(world.requests):
            if request is not None:
                yield from self._step(world, slot, request)
        for number in range(2):
            yield from self._drive(world, number)
        yield from self._deadlines_and_collector(world)
        if world.faults:
            for leader in range(self.plan.leaders):
                yield from self._crash(world, leader)

    def _step(self, world: World, slot: int, request: Request) -> Iterator[tuple[str, World]]:
        said, after, then = advance(world, request, self.plan.broken)
        problem = group_promises.meddled(world, after, request)
        after = after if problem is None else after._replace(problem=problem)
        who = f"{request.kind.upper()} of driver {request.driver}"
        who += f" at leader {request.leader}" if self.plan.leaders > 1 else ""
        if request.kind == "collect":
            who = "the collector"
        elif slot == self._copy:
            who = f"a late copy of {who}"
        if isinstance(then, Request):
            yield f"{who} {said}", after._replace(requests=put(after.requests, slot, then))
            return
        after = after._replace(requests=put(after.requests, slot, None))
        if slot in (self._copy, self._collector):
            yield f"{who} {said}", after
            return
        told = self._judged(after, request, then)
        for choice, now in self._answer(told, slot, request, then):
            yield f"{who} {said}: {then.verdict}{choice}", now
        if world.faults:
            lost = after._replace(faults=world.faults - 1)
            yield f"!{who} {said}: {then.verdict}, and the answer is lost", lost

    def _judged(self, world: World, request: Request, answer: Answer) -> World:
        if world.problem:
            return world
        turn = world.drivers[request.driver].turn
        current = request.nonce == self._nonce(request.driver, turn) and not self.plan.attaches
        problem = group_promises.wrong_answer(world, request, answer, current=current)
        return world._replace(problem=problem or "")

    def _crash(self, world: World, leader: int) -> Iterator[tuple[str, World]]:
        left = tuple(
            None
            if r is not None and r.leader == leader and slot not in (self._copy, self._collector)
            else r
            for slot, r in enumerate(world.requests)
        )
        if left != world.requests:
            blocks = put(world.blocks, leader, (NONE, 0, 0))
            yield (
                f"!leader {leader} crashes",
                world._replace(requests=left, blocks=blocks, faults=world.faults - 1),
            )

    def _deadlines_and_collector(self, world: World) -> Iterator[tuple[str, World]]:
        free = world.requests[self._collector] is None
        for group, header in enumerate(world.headers):
            if header.state == OPEN and self.plan.deadlines:
                after = world.with_header(group, header._replace(state=ABORTED))
                yield f"the deadline aborts {group}", after
            if header.state == OPEN and self.plan.operator and "G4-end" in self.plan.broken:
                after = world.with_header(group, header._replace(state=COMMITTED))
                yield f"!an operator commits {group}", after
            if self.plan.collects and free and not header.gone and header.state != OPEN:
                request = Request("collect", 0, 0, NONE, group=group)
                after = world._replace(requests=put(world.requests, self._collector, request))
                yield f"the collector finds no records of {group}", after

    # Drivers

    def _nonce(self, number: int, turn: int) -> int:
        return 10 * number + turn

    def _work(self, world: World, number: int) -> Work | None:
        driver, work = world.drivers[number], self.plan.work[number]
        return work[driver.batch] if driver.batch < len(work) else None

    def _drive(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        driver, work = world.drivers[number], self._work(world, number)
        if driver.phase == "new":
            request = Request("open", self._leader(number), number, NONE)
            yield f"driver {number} opens", self._send(world, number, request, phase="open")
        yield from self._tasks(world, number)
        if world.requests[number] is not None:
            return
        if driver.phase == "open":  # the answer was lost
            request = Request("open", self._leader(number), number, NONE)
            yield f"driver {number} opens again", self._send(world, number, request)
        elif driver.phase == "run" and work is not None:
            yield from self._decide(world, number, work)
        elif driver.phase == "commit" and work is not None:
            yield from self._decide(world, number, work, again=" again")
            yield f"driver {number} gives up", self._give_up(world, number)
        elif driver.phase == "abort":
            yield f"driver {number} aborts again", self._give_up(world, number)

    def _leader(self, number: int) -> int:
        return number % self.plan.leaders

    def _send(self, world: World, slot: int, request: Request, phase: str = "") -> World:
        world = world._replace(requests=put(world.requests, slot, request))
        if phase:
            driver = world.drivers[request.driver]._replace(phase=phase)
            world = world._replace(drivers=put(world.drivers, request.driver, driver))
        return world

    def _slots_of(self, number: int, turn: int) -> range:
        first = self._first[number] + turn * self._attempts
        return range(first, first + self._attempts)

    def _tasks(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        """Of the batch at hand and of earlier ones, whose losers may be late."""
        driver, work = world.drivers[number], self._work(world, number)
        for turn in range(driver.turn + 1) if driver.epoch != NONE else ():
            current = turn == driver.turn and driver.phase == "run" and work is not None
            for at in self._slots_of(number, turn) if turn < self._turns[number] else ():
                attempt = world.attempts[at]
                if attempt.state == "-" and current and work is not None:
                    if at - self._slots_of(number, turn).start < abs(work.attempts):
                        yield from self._begin(world, number, at, work)
                elif attempt.state == "?" and world.requests[2 + at] is None:
                    failed = world._replace(attempts=put(world.attempts, at, Attempt("x")))
                    yield f"attempt {at} fails, without an answer", failed
                elif attempt.state == "o":
                    yield from self._write(world, at, attempt)

    def _begin(self, world: World, number: int, at: int, work: Work) -> Iterator[tuple[str, World]]:
        driver = world.drivers[number]
        kind = "plain" if work.attempts == PLAIN else "begin"
        nonce = NONE if kind == "plain" else self._nonce(number, driver.turn)
        hint = work.batch if self.plan.hints else None
        leader = (at - self._first[number] + number) % self.plan.leaders
        request = Request(kind, leader, number, driver.epoch, nonce, hint)
        asked = world._replace(attempts=put(world.attempts, at, Attempt("?")))
        asked = self._send(asked, 2 + at, request)
        yield f"driver {number}: attempt {at} asks", asked
        if world.copies:
            copied = self._send(asked, self._copy, request)._replace(copies=world.copies - 1)
            yield f"!driver {number}: attempt {at} asks, and a copy is under way", copied

    def _write(self, world: World, at: int, attempt: Attempt) -> Iterator[tuple[str, World]]:
        header = world.read(attempt.group)
        if header is None or header.state != OPEN:
            failed = world._replace(attempts=put(world.attempts, at, Attempt("x")))
            yield f"attempt {at} is refused by the owner", failed
            return
        if header.nonce == NONE:  # a plain transaction: its driver ends it at once
            ended = world.with_header(attempt.group, header._replace(state=COMMITTED))
            yield (
                "a plain transaction is committed",
                ended._replace(attempts=put(world.attempts, at, attempt._replace(state="p"))),
            )
            return
        is_given = attempt.number < header.reserved or "G1-reserved" in self.plan.broken
        rows = (*world.rows, (attempt.group, attempt.number, at)) if is_given else world.rows
        wrote = world._replace(
            rows=tuple(sorted(rows)),
            attempts=put(world.attempts, at, attempt._replace(state="w" if is_given else "x")),
        )
        yield f"attempt {at} writes as {attempt.group}.{attempt.number}", wrote
        if self.plan.forges and not any(x[2] == 99 for x in world.rows):
            index = header.reserved
            if "G1-reserved" in self.plan.broken:
                forged = tuple(sorted((*world.rows, (attempt.group, index, 99))))
                yield f"!somebody writes as {attempt.group}.{index}", world._replace(rows=forged)

    def _decide(
        self, world: World, number: int, work: Work, again: str = ""
    ) -> Iterator[tuple[str, World]]:
        """COMMIT_GROUP with a winner, or ABORT_GROUP where there can be none."""
        driver = world.drivers[number]
        slots = self._slots_of(number, driver.turn)[: abs(work.attempts)]
        attempts = [world.attempts[at] for at in slots]
        nonce = self._nonce(number, driver.turn)
        request = Request(
            "commit", self._leader(number), number, driver.epoch, nonce, batch=work.batch
        )
        if work.attempts == PLAIN:
            if attempts[0].state == "p":
                yield "driver goes on", self._next(world, number)
        elif not attempts or any(x.state == "d" for x in attempts):
            yield from self._sent(world, number, request, f"commits nothing{again}")
        for attempt in attempts:
            if attempt.state == "w":
                chosen = (attempt.number + 7,) if self.plan.misnames else (attempt.number,)
                yield from self._sent(
                    world,
                    number,
                    request._replace(group=attempt.group, winners=chosen),
                    f"commits {attempt.group}.{attempt.number}{again}",
                )
        if attempts and all(x.state == "x" for x in attempts) and not again:
            yield f"driver {number} has failed tasks", self._give_up(world, number)
        extends = self.plan.extends and world.copies and not again
        if extends and attempts and attempts[0].state == "w":
            extend = request._replace(kind="extend", group=attempts[0].group)
            sent = self._send(world, self._copy, extend)._replace(copies=world.copies - 1)
            yield f"driver {number} extends {attempts[0].group}", sent

    def _sent(
        self, world: World, number: int, request: Request, what: str
    ) -> Iterator[tuple[str, World]]:
        sent = self._send(world, number, request, phase="commit")
        yield f"driver {number} {what}", sent
        if world.copies and not self.plan.extends:
            copied = self._send(sent, self._copy, request)._replace(copies=world.copies - 1)
            yield f"!driver {number} {what}, and a copy is under way", copied

    def _give_up(self, world: World, number: int) -> World:
        driver = world.drivers[number]
        request = Request("abort", self._leader(number), number, driver.epoch)
        request = request._replace(nonce=self._nonce(number, driver.turn))
        return self._send(world, number, request, phase="abort")

    def _next(self, world: World, number: int) -> World:
        driver = world.drivers[number]
        new = driver._replace(
            phase="run", turn=driver.turn + 1, batch=driver.batch + 1, told=driver.batch + 1
        )
        if new.batch >= len(self.plan.work[number]):
            new = new._replace(phase="over")
        return world._replace(drivers=put(world.drivers, number, new))

    # Answers

    def _answer(
        self, world: World, slot: int, request: Request, answer: Answer
    ) -> Iterator[tuple[str, World]]:
        if slot >= 2:
            states = {"given": "o", "done": "d"}
            state = states.get(answer.verdict, "x")
            attempt = (
                Attempt(state, answer.group, answer.number) if state == "o" else Attempt(state)
            )
            yield "", world._replace(attempts=put(world.attempts, slot - 2, attempt))
            return
        driver = world.drivers[slot]
        if request.kind == "open":
            known = world.drivers[0].told
            for back in range(min(self.plan.older, known) + 1):
                begins = min(known - back, len(self.plan.work[1]))
                phase = "run" if begins < len(self.plan.work[1]) else "over"
                new = driver._replace(phase=phase, epoch=answer.epoch, batch=begins, told=begins)
                after = world._replace(
                    drivers=put(world.drivers, slot, new),
                    answered=max(world.answered, answer.epoch),
                )
                yield f" (and begins at batch {begins})", after
        elif request.kind == "commit" and answer.verdict in ("committed", "done"):
            yield "", self._next(world, slot)
        elif request.kind == "commit":
            yield "", self._give_up(world, slot)
        else:
            yield "", self._failed(world, slot)

    def _failed(self, world: World, number: int) -> World:
        driver = world.drivers[number]
        tries = driver.turn - driver.batch if number == 0 else self.plan.again
        if tries < self.plan.again and world.key.epoch == driver.epoch:
            new = driver._replace(phase="run", turn=driver.turn + 1)
        else:
            new = driver._replace(phase="over")
        return world._replace(drivers=put(world.drivers, number, new))
