"""Clients that share one transaction key, their coordinators, and what must hold of them.

Each client has the same piece of work, to be done once: it opens the key, learns whether the last
transaction of it was committed, and if not begins one, writes, and commits.  It asks again, under
the same opener or beginner, whatever it was not answered.  So at most one transaction commits, and
whoever is told so may rely on it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, TypeVar

from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.store import VersionConflict
from tests.support.clocks import FakeClock
from tests.unit.txn.schedules import ACTOR, LIFE, Choice, Died, GatedStore, Operation, StepLoop
from txn import key_records, records
from txn.collector import Collector
from txn.coordinator import Coordinator
from txn.coordinator_elections import Leader
from txn.coordinators import Coordinators
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.errors import (
    InvalidTxnStatus,
    TransactionKeyFenced,
    TransactionKeyNotFound,
    TransactionNotFound,
)
from txn.parts import TransactionParts
from txn.records import KeyEpoch, TxnState
from txn.store import TransactionStore
from txn.transaction_key import NO_EPOCH, KeyName, KeyRecord, OpenedKey
from txn.transaction_keys import TransactionKeys

T = TypeVar("T")
ZERO = CoordinatorId(0)
KEY = "k"
NAME = KeyName("", KEY)


@dataclass(frozen=True)
class Plan:
    """What may happen.

    `servers`: which one each client asks; `steps`: how many requests it makes; `writes`: whether
    it says so, which only reads; `arrive_late`: what was on its way when a server died may arrive
    at any time later, or never; `collections`: rounds that delete the headers of what has ended;
    `holds`: clients attach another connection after they opened it, and open it twice.
    """

    servers: tuple[int, int] = (0, 0)
    steps: tuple[int, int] = (4, 4)
    writes: bool = True
    crashes: int = 0
    arrive_late: bool = False
    deletions: int = 0
    collections: int = 0
    holds: bool = False
    keys: type[TransactionKeys] = TransactionKeys
    collector: type[Collector] = Collector


class Connection:
    """One of a client's, which the server may end."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        """That it was told to hold."""
        self.closed = False
        self._callbacks: dict[object, Callable[[], None]] = {}

    def close(self, why: str) -> None:
        self.closed = True
        for callback in list(self._callbacks.values()):
            callback()

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        token = object()
        self._callbacks[token] = callback
        return lambda: (self._callbacks.pop(token, None), None)[1]


class Client:
    """See the module's docstring."""

    def __init__(self, world: "KeyWorld", name: str, server: int, steps: int) -> None:
        self.name = name
        self.server = server
        self.steps = steps
        self.answers: list[Hashable] = []
        self.outcome = ""
        self.txn: TxnId | None = None
        self._world = world
        self.epoch: int | None = None
        """Under which epoch its present request is."""
        self.connections: list[Connection] = []
        self.late = False
        """Whether a newer one had been answered when that came to the server."""

    async def run(self) -> None:
        try:
            await self._work()
        except TransactionKeyFenced:
            self.outcome = "fenced"
        except InvalidTxnStatus as error:
            self.outcome = f"refused: {error}"
            if self.late or self._is_overtaken():
                self._world.wrong.append(f"{self.name} asked under an old epoch, got {error!r}")
        except TransactionNotFound as error:
            self._world.wrong.append(f"{self.name} was told {error!r}")

    def _is_overtaken(self) -> bool:
        """Whether the key had a newer epoch when it was refused, be it that nobody was told yet."""
        return self.epoch is not None and self._world.newest_made[0] > self.epoch

    async def _work(self) -> None:
        world = self._world
        opened = await self._open(self.name)
        if world.plan.holds and self.steps > 1:
            await self._hold(opened.epoch)
            return
        if opened.ended is TxnState.COMMITTED:
            self.outcome = "found it done"
            world.require_done(self)
            return
        if self.steps == 1:
            return
        key = KeyEpoch(KEY, opened.epoch)
        txn = self.txn = await self._ask(
            "begin", lambda led: led.begin(ZERO, 60_000, None, key, self.name), key.epoch
        )
        world.begun(self, txn)
        if self.steps == 2:
            return
        if world.plan.writes:
            await self._ask("add", lambda led: led.require_open(txn, None, key), key.epoch)
        await self._ask(
            "end", lambda led: led.end_transaction(txn, TxnState.COMMITTED, None, key), key.epoch
        )
        self.outcome = "committed"
        world.require_done(self)

    async def _open(self, opener: str) -> OpenedKey:
        connection = self._connect() if self._world.plan.holds else None
        opened = await self._ask(
            "open",
            lambda led: led.keys_of(ZERO, None, KEY)[0].open(NAME, NO_EPOCH, opener, connection),
        )
        if connection is not None:
            connection.epoch = opened.epoch
        self._world.opened(self, opened.epoch)
        return opened

    def _connect(self) -> Connection:
        self.connections.append(Connection())
        return self.connections[-1]

    async def _hold(self, epoch: int) -> None:
        """Attach, leave a transaction open, and open it again."""
        other = self._connect()
        await self._ask(
            "attach", lambda led: led.keys_of(ZERO, None, KEY)[0].attach(NAME, epoch, other), epoch
        )
        other.epoch = epoch
        key = KeyEpoch(KEY, epoch)
        txn = await self._ask(
            "begin", lambda led: led.begin(ZERO, 60_000, None, key, self.name), epoch
        )
        self._world.begun(self, txn)
        await self._open(f"{self.name} again")

    async def _ask(
        self, what: str, make: Callable[[Coordinators], Awaitable[T]], epoch: int | None = None
    ) -> T:
        """Until it is answered."""
        world = self._world
        while True:
            self.epoch, self.late = epoch, False
            world.store.seen[self.name] = []
            LIFE.set(world.store.life)
            try:
                answer = await make(world.servers[self.server])
            except Died:
                continue
            self.answers.append((what, answer if what != "add" else None))
            return answer


class KeyWorld:
    """Clients, the servers that they ask, and one store.

    Whenever the plan has crashes left every server may die, and be followed by new ones.  Of the
    writes that were on their way any may have arrived.
    """

    client_class: ClassVar[type[Client]] = Client

    def __init__(self, loop: StepLoop, plan: Plan) -> None:
        self.loop = loop
        self.plan = plan
        self.store = _Watched(self)
        self.newest_answered = NO_EPOCH
        self.answered: dict[int, str] = {}
        self.given: set[TxnId] = set()
        """Transactions that a client was told of."""
        self.crashes = plan.crashes
        self.newest_made = (NO_EPOCH, "")
        self.named: set[TxnId] = set()
        """Transactions that the key ever named."""
        self.done: set[TxnId] = set()
        """Transactions that were committed."""
        self.incarnation = 0
        self.late: list[Operation] = []
        self.wrong: list[str] = []
        self.servers = [self._server() for _ in range(max(plan.servers) + 1)]
        loop.settle()
        self.clients = [
            self.client_class(self, *each)
            for each in zip("ab", plan.servers, plan.steps, strict=True)
        ]
        self.tasks = [self._start(client.name, client.run()) for client in self.clients]
        self.tasks += [self._start("operator", self._delete()) for _ in range(plan.deletions)]
        self.tasks += [self._start("collector", self._collect()) for _ in range(plan.collections)]
        loop.settle()

    def _server(self) -> Coordinators:
        self.incarnation += 1
        store = TransactionStore(self.store, counters := TransactionCounters())
        parts = TransactionParts(
            store, Decisions(store), counters, FakeClock(), f"b{self.incarnation}", False
        )
        made = Coordinators(
            parts,
            Leader("b", "pulsar://b:6650"),
            parallelism=1,
            max_open=0,
            session_timeout_ms=30_000,
        )

        made._led[ZERO] = self.coordinator_class()(ZERO, parts, made._deadlines, max_open=0)
        return made

    def coordinator_class(self) -> type[Coordinator]:
        """What serves each client."""

        class Mine(Coordinator):
            keys_class: ClassVar[type[TransactionKeys]] = self.plan.keys

        return Mine

    async def _delete(self) -> None:
        """An operator deletes the key."""
        with suppress(TransactionKeyNotFound):
            await self.servers[0].keys_of(ZERO, None, KEY)[0].delete(NAME)

    async def _collect(self) -> None:
        """A round that begins when the explorer lets it."""

        async def nothing_left(segment: str, found: object) -> bool:
            return True

        parts = self.servers[0]._parts
        await self.store.get(key_records.floor_path(ZERO))
        make = self.plan.collector
        await make(parts, lambda _: True, nothing_left, interval_s=1, retention_s=0).collect()

    def _start(self, actor: str, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        token = ACTOR.set(actor)
        try:
            return self.loop.create_task(work)
        finally:
            ACTOR.reset(token)

    # What may happen

    def choices(self) -> Sequence[Choice]:
        waiting: list[Choice] = [
            ("go", number, each.actor, each.kind, each.key)
            for number, each in enumerate(self.store.waiting)
        ]
        late: list[Choice] = [
            ("late", number, each.actor, each.kind, each.key)
            for number, each in enumerate(self.late)
        ]
        crash: list[Choice] = []
        if self.crashes and waiting and self.plan.arrive_late:
            crash = [("crash",)]
        elif self.crashes and waiting:
            writes = [n for n, each in enumerate(self.store.waiting) if each.kind != "get"]
            counts = range(len(writes) + 1)
            crash = [("crash", *some) for count in counts for some in combinations(writes, count)]
        return [*waiting, *crash, *late] if waiting else []

    def do(self, choice: Choice) -> None:
        what, *rest = choice
        if what == "go":
            self.store.waiting.pop(int(str(rest[0]))).go.set_result(None)
        elif what == "late":
            self.loop.create_task(self._land(self.late.pop(int(str(rest[0])))))
        else:
            self._crash(rest)
        self.loop.settle()

    def _crash(self, arrived: Sequence[object]) -> None:
        self.crashes -= 1
        for number in arrived:
            self.loop.create_task(self._land(self.store.waiting[int(str(number))]))
        self.loop.settle()
        for each in self.servers:
            each._deadlines.close()
        self.servers = [self._server() for _ in self.servers]
        dead = self.store.kill()
        if self.plan.arrive_late:
            self.late += [each for each in dead if each.kind != "get"]

    async def _land(self, operation: Operation) -> None:
        try:
            await self.store.land(operation)
        except VersionConflict:
            return

    def state(self) -> Hashable:
        clients = tuple(
            (
                tuple(each.answers),
                each.outcome,
                each.late,
                tuple(self.store.seen.get(each.name, ())),
            )
            for each in self.clients
        )
        waiting = tuple(sorted((op.actor, op.kind, op.key) for op in self.store.waiting))
        late = tuple((op.actor, op.kind, op.key) for op in self.late)
        memory = tuple(
            (tuple(sorted(each._led[ZERO]._open)), each._led[ZERO].last_number)
            for each in self.servers
        )
        held = tuple(
            (
                one.epoch,
                one.closed,
                self.servers[client.server]._led[ZERO].keys.holders.epoch_of(NAME, one),
            )
            for client in self.clients
            for one in client.connections
        )
        return (
            *(self.store.contents(), clients, waiting, late, memory, held),
            *(self.crashes, self.incarnation, self.newest_answered, tuple(sorted(self.given))),
            *(
                self.newest_made,
                tuple(sorted(self.named)),
                tuple(self.store.seen.get("operator", ())),
                tuple(self.store.seen.get("collector", ())),
                tuple(sorted(self.done)),
            ),
            tuple(task.done() for task in self.tasks),
        )

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.store.kill()
        self.loop.settle()
        for each in self.servers:
            each._deadlines.close()

    # What must hold

    def opened(self, client: Client, epoch: int) -> None:
        assert self.answered.setdefault(epoch, client.name) == client.name, (
            f"epoch {epoch} was given to {self.answered[epoch]} and {client.name}"
        )
        self.newest_answered = max(self.newest_answered, epoch)
        for txn, header in self.headers().items():
            assert (
                txn not in self.given
                or header.state is not TxnState.OPEN
                or (header.key_epoch is not None and header.key_epoch.epoch >= epoch)
            ), f"epoch {epoch} was answered while {txn} of an older one was open"

    def arrived(self, actor: str) -> None:
        """The first operation of a request was let go."""
        for client in self.clients:
            if client.name == actor and client.epoch is not None:
                client.late = client.epoch < self.newest_answered

    def begun(self, client: Client, txn: TxnId) -> None:
        assert txn not in self.given, f"{txn} was given twice"
        self.given.add(txn)

    def ended(self, txn: TxnId, header: records.Header, actor: str) -> None:
        """A header was written, for that actor."""
        epoch = self.newest_answered if header.key_epoch is None else header.key_epoch.epoch
        if header.state is TxnState.COMMITTED:
            self.done.add(txn)
        if header.state is TxnState.COMMITTED and epoch < self.newest_answered:
            self.wrong.append(f"{epoch} committed after {self.newest_answered} was answered")

    def headers(self) -> dict[TxnId, records.Header]:
        found = {}
        for key in self.store._tables._records:
            if key.startswith(records.HEADERS):
                record = self.store._tables.record(key)
                assert record is not None
                found[records.txn_of_header(key)] = records.decode_header(key, record.value)
        return found

    def key_changed(self, record: KeyRecord) -> None:
        """The key was written."""
        if record.transaction is not None:
            self.named.add(record.transaction.txn)
        if record.epoch == NO_EPOCH:
            return
        epoch, opener = self.newest_made
        if record.epoch < epoch or (record.epoch == epoch and record.opener != opener):
            self.wrong.append(f"{record.opener} made epoch {record.epoch} after {opener} {epoch}")
        self.newest_made = (record.epoch, record.opener)

    def require_done(self, client: Client) -> None:
        if self.plan.deletions:
            return  # what was deleted tells no more how its last transaction ended
        assert len(self.done) == 1, f"{client.name} was told that the work is done"
        if client.outcome == "committed":
            assert self.done == {client.txn}

    def check(self) -> None:
        """After each step."""
        for task in self.tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        assert not self.wrong, self.wrong
        headers = self.headers()
        known = (self.named | self.given) & headers.keys()
        is_open = [t for t in known if headers[t].state is TxnState.OPEN]
        assert len(is_open) <= 1, f"{is_open} are open at once"
        if not self.plan.deletions:
            assert len(self.done) <= 1, f"the work was done twice: {self.done}"

    def finish(self) -> None:
        """Nobody can go on."""
        assert all(task.done() for task in self.tasks), "somebody waits for ever"
        for one in (each for client in self.clients for each in client.connections):
            assert one.closed or one.epoch in (None, self.newest_answered), (
                f"a connection of epoch {one.epoch} is not closed"
            )
            assert not one.closed or one.epoch != self.newest_answered, (
                f"a connection of the newest epoch, {one.epoch}, is closed"
            )
        if self.plan.deletions or self.plan.holds:
            return
        newest = self.answered[self.newest_answered]
        (last,) = (each for each in self.clients if each.name == newest)
        assert last.outcome in ("committed", "found it done"), (
            f"{last.name} has the newest epoch and was {last.outcome}"
        )
        assert len(self.done) == 1


class _Watched(GatedStore):
    def __init__(self, world: KeyWorld) -> None:
        super().__init__(FakeClock())
        self._world = world

    def begins(self, operation: Operation) -> None:
        if not self.seen.get(operation.actor):
            self._world.arrived(operation.actor)

    def changed(self, operation: Operation) -> None:
        if operation.key.startswith(records.HEADERS) and operation.kind == "put":
            record = self._tables.record(operation.key)
            assert record is not None
            self._world.ended(
                records.txn_of_header(operation.key),
                records.decode_header(operation.key, record.value),
                operation.actor,
            )
        elif operation.key.startswith(key_records.KEYS) and operation.kind == "put":
            record = self._tables.record(operation.key)
            assert record is not None
            self._world.key_changed(key_records.decode_key(operation.key, record.value))
