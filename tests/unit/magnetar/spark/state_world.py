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
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.commit import Decision, WinningAttempt
from magnetar.spark.plain_groups import PlainGroups, open_state
from magnetar.spark.sink_options import StateOption, TransactionKeyOption
from magnetar.spark.state_topic import ReadSoFar
from tests.unit.magnetar.spark.driver_world import DriverWorld, Life
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
class ReadingLife(Life):
    """One that keeps how far it has read the log."""

    known: ReadSoFar = field(default_factory=ReadSoFar)
    read: int = -1
    """How far its reader is."""


class World(DriverWorld[ReadingLife]):
    """See the module's docstring."""

    FAILURES = FAILURES

    def __init__(self, loop: StepLoop, plan: Plan) -> None:
        self.plan = plan
        self.log: list[tuple[str, bytes, TxnId | None]] = []
        self.txns: dict[TxnId, str] = {}
        self.rows: dict[TxnId, int] = {}
        """The batch whose row is in a transaction."""
        left = {
            "kill": plan.crashes,
            "time": plan.timeouts,
            "lose": plan.losses,
            "copy": plan.copies,
        }
        super().__init__(loop, plan.drivers, left)

    @property
    def may_fail(self) -> bool:
        return bool(self.plan.timeouts or self.plan.losses)

    def life(self, name: str) -> ReadingLife:
        return ReadingLife(name)

    def loss(self) -> Exception:
        return OperationTimedOut("nobody has answered")

    # What the explorer asks

    def choices(self) -> Sequence[Choice]:
        found: list[Choice] = [
            ("go", gate.actor)
            for gate in self.gates
            if gate.what != "read ..." or self.has_news(gate.actor)
        ]
        found += self.deaths()
        if self.left["lose"]:
            found += [("lose", gate.actor) for gate in self.gates if gate.what.endswith("end ...")]
            found += [("lose", gate.actor) for gate in self.gates if gate.what == "... end"]
        if self.left["time"]:
            found += [("time", str(t)) for t, state in self.txns.items() if state == "OPEN"]
        if self.left["copy"]:
            states = (n for n, each in enumerate(self.log) if b'"state"' in each[1])
            found += [("copy", str(n)) for n in states]
        return found

    def happen(self, kind: str, actor: str) -> None:
        if kind == "time":
            self.txns[TxnId.parse(actor)] = "ABORTED"
        elif kind == "copy":
            self.log.append(self.log[int(actor)])
        else:
            super().happen(kind, actor)

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
            self.waiting(),
            self.outcomes(),
            tuple((life.read, _told(life.known)) for life in self.lives.values()),
            tuple(self.left.values()),
        )

    def finish(self) -> None:
        super().finish()
        assert sorted(self.visible()) == list(range(self.plan.batches)), f"lost: {self.visible()}"

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
        life = self.lives[actor]
        return bool(self.readable(life.read) or life.known.state.pending)

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

    async def run(self, life: ReadingLife) -> None:
        client = cast("magnetar.Client", _Client(self, life))
        state, where = await open_state(client, TOPIC, KEY, -1, life.name, life.known)
        key = TransactionKeyOption(KEY, state.epoch)
        life.known = ReadSoFar(where.start)
        first = await self.ask(life, "recover", lambda: max(self.noted, default=-1) + 1)
        for batch in range(first, self.plan.batches):
            await self._batch(life, client, key, where, batch)

    async def _batch(
        self,
        life: ReadingLife,
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

    async def ask(
        self, life: ReadingLife, what: str, work: Callable[[], T], *, writes: bool = False
    ) -> T:
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

    async def gate(self, life: ReadingLife, what: str) -> None:
        try:
            await super().gate(life, what)
        except OperationTimedOut:
            life.seen.append((what, "lost"))
            raise


class Calm(World):
    """Without an explorer: whatever is asked is done and answered at once."""

    def __init__(self) -> None:
        super().__init__(cast("StepLoop", SimpleNamespace(settle=lambda: None)), Plan(drivers=0))
        self.ended: list[tuple[TxnId, bool]] = []
        """What was asked to be committed (or aborted)."""

    def client(self) -> magnetar.Client:
        """Of one more process."""
        return cast("magnetar.Client", _Client(self, ReadingLife("")))

    def end(self, txn: TxnId, commit: bool) -> None:
        self.ended.append((txn, commit))
        super().end(txn, commit)

    async def ask(
        self, life: ReadingLife, what: str, work: Callable[[], T], *, writes: bool = False
    ) -> T:
        await asyncio.sleep(0)
        return work()


def _told(known: ReadSoFar) -> Hashable:
    """Without digests, which are of nonces that are drawn."""
    begin = None if known.begin is None else known.begin.place
    return begin, known.place, repr(known.state), tuple(sorted(map(str, known.settled)))


class _Client:
    """As much of `magnetar.Client` as the state topic needs."""

    def __init__(self, world: World, life: ReadingLife) -> None:
        self._world, self._life = world, life

    async def _ask(self, what: str, work: Callable[[], T], *, writes: bool = True) -> T:
        return await self._world.ask(self._life, what, work, writes=writes)

    async def layout(self, topic: str) -> object:
        return SimpleNamespace(segments={0: SimpleNamespace(legacy=False)})

    def producer(self, topic: str, **given: object) -> "_Producer":
        return _Producer(self._world, self._life)

    @asynccontextmanager
    async def checkpoint_consumer(
        self, topic: str, *, start: magnetar.Checkpoint
    ) -> AsyncIterator["_Reader"]:
        self._life.read = start.after(0).entry_id
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

    def __init__(self, world: World, life: ReadingLife) -> None:
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
    """Gets what can be read, behind where it was opened."""

    def __init__(self, world: World, life: ReadingLife) -> None:
        self._world, self._life = world, life

    async def receive_batch(self, most: int, timeout_s: float) -> list[object]:
        world, life = self._world, self._life
        found = await world.ask(life, "read", lambda: world.readable(life.read))
        life.read = max([life.read, *(number for number, _, _ in found)])
        return [
            SimpleNamespace(
                key=key,
                value=value,
                id=SimpleNamespace(entry=SimpleNamespace(key=(0, number))),
                publish_time_ms=0,
            )
            for number, key, value in found
        ]
