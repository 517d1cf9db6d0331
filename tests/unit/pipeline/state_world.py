"""Two drivers of one query on brokers without keys: a state topic and transactions in memory.

A driver opens the key in the state topic, and for each batch writes a row in a transaction, has the
production's `PlainGroups` commit it, and notes it as committed.  The client that these use is ours:
each request waits until the explorer lets it go, and each that writes a second time before it is
answered.  What can be read is what brokers show: nothing behind an open transaction, and nothing
aborted.  A driver may die at any gate, and is started again; a deadline may come; an answer to the
end of a transaction may be lost; the state that an opener writes may be stored again, later.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar, cast

import magnetar
from magnetar.errors import (
    InvalidTransactionStatus,
    NotAllowed,
    OperationTimedOut,
    TransactionKeyFenced,
    TransactionNotFound,
)
from magnetar.transactions.txn_id import TxnId
from pipeline.commit import Decision, WinningAttempt
from pipeline.plain_groups import PlainGroups, open_state
from pipeline.sink_options import StateOption, TransactionKeyOption
from pipeline.state_topic import ReadSoFar
from tests.unit.pipeline.sink_world import Gate
from tests.unit.txn.schedules import Choice, StepLoop

T = TypeVar("T")
KEY, QUERY, TOPIC = "k", "q", "topic://public/default/state"
DRAWN = re.compile(rb"[0-9a-f]{32}")
"""A nonce that is another one each time."""
FAILURES = (
    TransactionKeyFenced,
    InvalidTransactionStatus,
    OperationTimedOut,
    NotAllowed,
    TransactionNotFound,
)


@dataclass(frozen=True)
class Plan:
    """What may happen; as in `sink_world`.  `forgets`: ended transactions are not known."""

    drivers: int = 2
    batches: int = 1
    crashes: int = 0
    timeouts: int = 0
    losses: int = 0
    copies: int = 0
    forgets: bool = False
    groups: type[PlainGroups] = PlainGroups


@dataclass
class Life:
    """One run of a driver."""

    name: str
    task: "asyncio.Task[None] | None" = None
    outcome: str = ""
    seen: list[Hashable] = field(default_factory=list)
    known: ReadSoFar = field(default_factory=ReadSoFar)


class World:
    """See the module's docstring."""

    def __init__(self, loop: StepLoop, plan: Plan) -> None:
        self.plan = plan
        self.loop = loop
        self.log: list[tuple[str, bytes, TxnId | None]] = []
        self.txns: dict[TxnId, str] = {}
        self.rows: dict[TxnId, int] = {}
        """The batch whose row is in a transaction."""
        self.noted: set[int] = set()
        self.gates: list[Gate] = []
        self.left = {
            "kill": plan.crashes,
            "time": plan.timeouts,
            "lose": plan.losses,
            "copy": plan.copies,
        }
        self.lives: dict[str, Life] = {}
        for number in range(plan.drivers):
            self._start("AB"[number])
        self.loop.settle()

    # What the explorer asks

    def choices(self) -> Sequence[Choice]:
        found: list[Choice] = [
            ("go", gate.actor)
            for gate in self.gates
            if gate.what != "read ..." or self.has_news(gate.actor)
        ]
        if self.left["kill"]:
            found += [("kill", gate.actor) for gate in self.gates]
        if self.left["lose"]:
            found += [("lose", gate.actor) for gate in self.gates if gate.what.endswith("end ...")]
            found += [("lose", gate.actor) for gate in self.gates if gate.what == "... end"]
        if self.left["time"]:
            found += [("time", str(t)) for t, state in self.txns.items() if state == "OPEN"]
        if self.left["copy"]:
            states = (n for n, each in enumerate(self.log) if b'"state"' in each[1])
            found += [("copy", str(n)) for n in states]
        return found

    def do(self, choice: Choice) -> None:
        kind, actor = str(choice[0]), str(choice[1])
        if kind != "go":
            self.left[kind] -= 1
        if kind == "time":
            self.txns[TxnId.parse(actor)] = "ABORTED"
            return
        if kind == "copy":
            self.log.append(self.log[int(actor)])
            return
        gate = next(gate for gate in self.gates if gate.actor == actor)
        self.gates.remove(gate)
        life = self.lives[actor]
        if kind == "go":
            gate.go.set_result(None)
        elif kind == "lose":
            gate.go.set_exception(OperationTimedOut("nobody has answered"))
        else:
            assert life.task is not None
            life.outcome = "killed"
            life.task.cancel()
            self.loop.settle()
            self.gates = [each for each in self.gates if each.actor != actor]
            self._start(life.name[0])
        self.loop.settle()

    def check(self) -> None:
        seen = self.visible()
        assert len(set(seen)) == len(seen), f"seen twice: {seen}"
        assert set(seen) == set(range(len(seen))), f"a hole: {seen}"
        assert self.noted <= set(seen), f"noted as committed, not seen: {self.noted - set(seen)}"

    def state(self) -> Hashable:
        return (
            tuple((DRAWN.sub(b"", value), txn) for _, value, txn in self.log),
            tuple(self.txns.items()),
            tuple(self.noted),
            tuple(sorted((gate.actor, gate.what) for gate in self.gates)),
            tuple(
                (life.name, life.outcome, tuple(life.seen), repr(life.known))
                for life in self.lives.values()
            ),
            tuple(self.left.values()),
        )

    def finish(self) -> None:
        outcomes = {life.name: life.outcome for life in self.lives.values()}
        assert all(outcomes.values()), f"somebody waits for ever: {outcomes}"
        assert "done" in outcomes.values(), f"nobody has finished: {outcomes}"
        assert sorted(self.visible()) == list(range(self.plan.batches)), f"lost: {self.visible()}"

    def close(self) -> None:
        for life in self.lives.values():
            if life.task is not None:
                life.outcome = life.outcome or "closed"
                life.task.cancel()
        self.loop.settle()

    def visible(self) -> list[int]:
        return [batch for txn, batch in self.rows.items() if self.txns[txn] == "COMMITTED"]

    # The broker

    def readable(self, after: int) -> list[tuple[int, str, bytes]]:
        """What a reader gets that has come that far."""
        found = []
        for number, (key, value, txn) in enumerate(self.log):
            state = "COMMITTED" if txn is None else self.txns[txn]
            if state == "OPEN":
                break
            if state == "COMMITTED" and number > after:
                found.append((number, key, value))
        return found

    def has_news(self, actor: str) -> bool:
        """Whether reading on is of use: there is something, or somebody's intent to be settled."""
        known = self.lives[actor].known
        return bool(self.readable(known.place[1]) or known.state.pending)

    def append(self, key: str, value: bytes, txn: TxnId | None) -> int:
        if txn is not None and self.txns[txn] != "OPEN":
            raise NotAllowed("the transaction has ended")
        self.log.append((key, value, txn))
        return len(self.log) - 1

    def begin(self) -> TxnId:
        txn = TxnId(0, len(self.txns))
        self.txns[txn] = "OPEN"
        return txn

    def end(self, txn: TxnId, commit: bool) -> None:
        wanted = "COMMITTED" if commit else "ABORTED"
        if self.txns[txn] == "OPEN":
            self.txns[txn] = wanted
        elif self.plan.forgets:
            raise TransactionNotFound("its end is forgotten")
        elif self.txns[txn] != wanted:
            raise InvalidTransactionStatus(f"it is {self.txns[txn]}")

    # What a driver does

    def _start(self, name: str) -> None:
        number = sum(other[0] == name for other in self.lives)
        life = Life(f"{name}{number}")
        self.lives[life.name] = life
        life.task = self.loop.create_task(self._live(life))

    async def _live(self, life: Life) -> None:
        client = cast("magnetar.Client", _Client(self, life))
        try:
            await self._run(life, client)
            life.outcome = "done"
        except FAILURES as error:
            if not life.outcome:
                life.outcome = f"{type(error).__name__}: {error}"
                may_be = self.plan.timeouts or self.plan.losses
                if may_be and not isinstance(error, TransactionKeyFenced):
                    self._start(life.name[0])

    async def _run(self, life: Life, client: magnetar.Client) -> None:
        state, where = await open_state(client, TOPIC, KEY, -1, life.name, life.known)
        key = TransactionKeyOption(KEY, state.epoch)
        life.known = ReadSoFar((where.start[0], where.start[1] - 1))
        first = await self.ask(life, "recover", lambda: max(self.noted, default=-1) + 1)
        for batch in range(first, self.plan.batches):
            await self._batch(life, client, key, where, batch)

    async def _batch(
        self,
        life: Life,
        client: magnetar.Client,
        key: TransactionKeyOption,
        where: StateOption,
        batch: int,
    ) -> None:
        txn = await client.begin_transaction()
        self.rows[txn] = batch
        groups = self.plan.groups(client, key, where, life.known, [txn])
        decision = Decision(life.name, txn, (WinningAttempt(txn, {}),), QUERY, batch)
        try:
            await groups.commit(decision, f"up to {batch}")
        except FAILURES:
            await groups.abort()  # Spark's hook
            raise
        await self.ask(life, "note", lambda: self.noted.add(batch))

    async def ask(self, life: Life, what: str, work: Callable[[], T], *, writes: bool = False) -> T:
        """Let go to arrive, and where it writes again to be answered.

        Without deaths and losses nobody can tell when an answer comes, or what is one's own.
        """
        troubled = self.plan.crashes or self.plan.losses
        if troubled or what not in ("begin", "recover", "note"):
            await self.gate(life, f"{what} ...")
        try:
            answer: object = work()
        except FAILURES as error:
            answer = error
        if writes and troubled:
            await self.gate(life, f"... {what}")
        if what != "read":  # of that only matters how far it came
            life.seen.append((what, str(answer)))
        if isinstance(answer, Exception):
            raise answer
        return cast("T", answer)

    async def gate(self, life: Life, what: str) -> None:
        if life.outcome:
            raise asyncio.CancelledError  # a dead process asks for nothing
        gate = Gate(life.name, what, self.loop.create_future())
        self.gates.append(gate)
        try:
            await gate.go
        except OperationTimedOut:
            life.seen.append((what, "lost"))
            raise


class _Client:
    """As much of `magnetar.Client` as the state topic needs."""

    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life

    async def _ask(self, what: str, work: Callable[[], T], *, writes: bool = True) -> T:
        return await self._world.ask(self._life, what, work, writes=writes)

    async def layout(self, topic: str) -> object:
        return SimpleNamespace(segments={0: SimpleNamespace(legacy=False)})

    def producer(self, topic: str, **given: object) -> "_Producer":
        return _Producer(self._world, self._life)

    @asynccontextmanager
    async def checkpoint_consumer(self, topic: str, **given: object) -> AsyncIterator["_Reader"]:
        yield _Reader(self._world, self._life)

    @asynccontextmanager
    async def queue_consumer(self, *given: object, **more: object) -> AsyncIterator[None]:
        yield

    async def begin_transaction(self, **given: object) -> TxnId:
        return await self._ask("begin", self._world.begin, writes=False)

    async def end_transaction(self, txn: TxnId, *, commit: bool) -> None:
        await self._ask("end", lambda: self._world.end(txn, commit))

    def attach_transaction(self, txn: TxnId) -> "_Attached":
        return _Attached(txn)


@dataclass
class _Attached:
    """Of which nothing is on its way: `send` waits."""

    id: TxnId

    async def __aenter__(self) -> "_Attached":
        return self

    async def __aexit__(self, *given: object) -> None:
        """Nothing is held."""

    async def settled(self) -> None:
        """It is."""


class _Producer:
    """Opened by awaiting it, left by `async with`."""

    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life

    def __await__(self) -> Generator[object, None, "_Producer"]:
        return self._self().__await__()

    async def _self(self) -> "_Producer":
        return self

    async def __aenter__(self) -> "_Producer":
        return self

    async def __aexit__(self, *given: object) -> None:
        """Nothing is held."""

    async def send(
        self, value: bytes, *, key: str, transaction: "_Attached | None" = None
    ) -> object:
        txn = None if transaction is None else transaction.id
        world = self._world
        number = await world.ask(
            self._life, "send", lambda: world.append(key, value, txn), writes=True
        )
        return SimpleNamespace(entry=SimpleNamespace(key=(0, number)))


class _Reader:
    """Gets what can be read, behind what is known."""

    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life

    async def receive_batch(self, most: int, timeout_s: float) -> list[object]:
        world, known = self._world, self._life.known
        found = await world.ask(self._life, "read", lambda: world.readable(known.place[1]))
        return [
            SimpleNamespace(
                key=key, value=value, id=SimpleNamespace(entry=SimpleNamespace(key=(0, number)))
            )
            for number, key, value in found
        ]
