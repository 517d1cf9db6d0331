"""Two drivers of one query, a coordinator in memory, and what must hold of what readers see.

A driver does what Spark does: it opens the key, reads the checkpoint, and for each batch has its
tasks write (with tries that fail), commits, and notes the batch as committed; what is raised has
the abort hook run, by another object, and ends the query.  The driver's part is the production's
`SinkDriver`, judged with the production's reports.  Each request to the coordinator, and each
write, waits until the explorer lets it go: the request first, then its answer.  A driver may die
before any of them, and is started again; one that is not let go on is frozen.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from magnetar.errors import (
    ConnectionLost,
    InvalidTransactionStatus,
    OperationTimedOut,
    TransactionKeyFenced,
)
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.commit import Decision
from magnetar.spark.sink_driver import SinkDriver
from magnetar.spark.task_report import RowCount, TaskReport
from tests.unit.magnetar.spark.driver_world import DriverWorld, Life
from tests.unit.txn.schedules import Choice, StepLoop

T = TypeVar("T")
QUERY = "q"
SEGMENT = "t-0"
LOSABLE = ("... open", "... begin", "... commit", "... abort")
"""What is sent again when its answer is lost; that of a write is known by the segment."""
FAILURES = (TransactionKeyFenced, InvalidTransactionStatus, OperationTimedOut)


@dataclass(frozen=True)
class Plan:
    """What may happen.

    `drivers` that run the query, all of them from the start; `crashes`: how often one is killed,
    and started again; `timeouts`: how often the open group's time is up; `losses`: how often an
    answer is lost, and asked for again, or not if it `gives_up`.  Who fails for these is started
    again.  `losers`: tasks whose first try writes and fails.  `hint`: whether tasks are told query
    and batch.
    """

    drivers: int = 2
    batches: int = 1
    partitions: int = 1
    losers: int = 0
    crashes: int = 0
    timeouts: int = 0
    losses: int = 0
    gives_up: bool = False
    hint: bool = True
    driver: type[SinkDriver] = SinkDriver
    coordinator: "type[Coordinator] | None" = None


@dataclass
class Group:
    """One try of a batch, at the coordinator."""

    number: int
    nonce: str
    epoch: int
    state: str = "OPEN"
    attempts: int = 0
    winners: tuple[TxnId, ...] = ()
    query: str = ""
    batch: int = -1
    positions: str | None = None


class Coordinator:
    """Rules G1 to G8 of one key, in memory."""

    def __init__(self) -> None:
        self.epoch = -1
        self.groups: list[Group] = []

    @property
    def open_group(self) -> Group | None:
        return next((group for group in self.groups if group.state == "OPEN"), None)

    def last_batch(self, query: str) -> int:
        done = [g.batch for g in self.groups if g.state == "COMMITTED" and g.query == query]
        return max(done, default=-1)

    def open_key(self) -> int:
        self.epoch += 1
        self.abort_open()
        return self.epoch

    def begin(
        self, epoch: int, nonce: str, query: str | None, batch: int | None
    ) -> tuple[TxnId, TxnId] | None:
        self._require(epoch)
        if query is not None and batch is not None and batch <= self.last_batch(query):
            return None
        group = self._group_of(nonce)
        group.attempts += 1
        return TxnId(0, group.number), TxnId(0, group.attempts << 44 | group.number)

    def commit(self, epoch: int, decision: Decision, positions: str | None) -> bool:
        self._require(epoch)
        mine = next((group for group in self.groups if group.nonce == decision.nonce), None)
        same = mine is not None and (mine.query, mine.batch) == (decision.query, decision.batch)
        if mine is not None and same and mine.state == "COMMITTED":
            return False
        if decision.batch <= self.last_batch(decision.query):
            if mine is not None and mine.state == "OPEN":
                mine.state = "ABORTED"
            self._require_positions(decision, positions)
            return True
        if mine is not None and decision.group is None:
            raise InvalidTransactionStatus("the group has attempts")
        if mine is None and decision.group is not None:
            raise InvalidTransactionStatus("there is no such group")
        group = self._group_of(decision.nonce)
        assert decision.group in (None, TxnId(0, group.number))
        assert all(w.attempt.least >> 44 in range(1, group.attempts + 1) for w in decision.winners)
        group.state = "COMMITTED"
        group.winners = tuple(winner.attempt for winner in decision.winners)
        group.query, group.batch = decision.query, decision.batch
        group.positions = positions
        return False

    def abort(self, epoch: int) -> bool:
        self._require(epoch)
        return self.abort_open()

    def _require_positions(self, decision: Decision, positions: str | None) -> None:
        for each in self.groups:
            is_it = (each.query, each.batch) == (decision.query, decision.batch)
            if is_it and each.state == "COMMITTED" and each.positions != positions:
                raise InvalidTransactionStatus("committed with other positions")

    def _require(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise TransactionKeyFenced(f"epoch {epoch} is not {self.epoch}")

    def abort_open(self) -> bool:
        group = self.open_group
        if group is not None:
            group.state = "ABORTED"
        return group is not None

    def _group_of(self, nonce: str) -> Group:
        known = next((group for group in self.groups if group.nonce == nonce), None)
        if known is not None and known.state != "OPEN":
            raise InvalidTransactionStatus("the group of this nonce has ended")
        if known is None:
            if self.open_group is not None:
                raise InvalidTransactionStatus("another group of the key is open")
            known = Group(len(self.groups), nonce, self.epoch)
            self.groups.append(known)
        return known

    def state(self) -> Hashable:
        return self.epoch, tuple(tuple(vars(group).values()) for group in self.groups)


@dataclass
class Row:
    """One that was stored; late ones too, for readers decide by the group."""

    batch: int
    partition: int
    attempt: TxnId


@dataclass
class CountingLife(Life):
    """One that counts its batches, for their nonces."""

    nonces: int = 0


class World(DriverWorld[CountingLife]):
    """See the module's docstring."""

    FAILURES = FAILURES

    def __init__(self, loop: StepLoop, plan: Plan) -> None:
        self.plan = plan
        self.coordinator = (plan.coordinator or Coordinator)()
        self.rows: list[Row] = []
        left = {"kill": plan.crashes, "time": plan.timeouts, "lose": plan.losses}
        super().__init__(loop, plan.drivers, left)

    @property
    def may_fail(self) -> bool:
        return bool(self.plan.timeouts or (self.plan.losses and self.plan.gives_up))

    def life(self, name: str) -> CountingLife:
        return CountingLife(name)

    def loss(self) -> Exception:
        return ConnectionLost("the answer is lost")

    # What the explorer asks

    def choices(self) -> Sequence[Choice]:
        found: list[Choice] = [("go", gate.actor) for gate in self.gates]
        found += self.deaths()
        if self.left["lose"]:
            found += [("lose", gate.actor) for gate in self.gates if gate.what in LOSABLE]
        if self.left["time"] and self.coordinator.open_group is not None:
            found.append(("time", "is up"))
        return found

    def happen(self, kind: str, actor: str) -> None:
        if kind == "time":
            self.coordinator.abort_open()
        else:
            super().happen(kind, actor)

    def check(self) -> None:
        visible = self.visible()
        assert len(set(visible)) == len(visible), f"seen twice: {visible}"
        by_batch = {batch for batch, _ in visible}
        for batch in by_batch:
            parts = {part for seen, part in visible if seen == batch}
            assert len(parts) == self.plan.partitions, f"seen in part: {visible}"
        assert by_batch == set(range(len(by_batch))), f"a hole: {visible}"
        assert self.noted <= by_batch, f"noted as committed, not seen: {self.noted - by_batch}"
        open_groups = [group for group in self.coordinator.groups if group.state == "OPEN"]
        assert len(open_groups) <= 1, "two groups are open"
        for group in self.coordinator.groups:
            wanted = f"up to {group.batch}" if group.state == "COMMITTED" else None
            assert group.positions == wanted, f"{group} has other positions"

    def state(self) -> Hashable:
        rows = tuple((row.batch, row.partition, row.attempt) for row in self.rows)
        return (
            self.coordinator.state(),
            self.outcomes(),
            self.waiting(),
            rows,
            tuple(self.noted),
            tuple(self.left.values()),
        )

    def finish(self) -> None:
        super().finish()
        seen = {batch for batch, _ in self.visible()}
        assert seen == set(range(self.plan.batches)), f"lost: only {seen} are seen"

    def visible(self) -> list[tuple[int, int]]:
        winners = {
            attempt
            for group in self.coordinator.groups
            if group.state == "COMMITTED"
            for attempt in group.winners
        }
        return [(row.batch, row.partition) for row in self.rows if row.attempt in winners]

    # What a driver does

    async def run(self, life: CountingLife) -> None:
        epoch = await self.ask(life, "open", self.coordinator.open_key)
        first = await self.ask(life, "recover", lambda: max(self.noted, default=-1) + 1)
        for batch in range(first, self.plan.batches):
            await self._batch(life, epoch, batch)

    async def _batch(self, life: CountingLife, epoch: int, batch: int) -> None:
        life.nonces += 1
        nonce = f"{life.name}.{life.nonces}"
        try:
            reports = [
                await self._task(life, epoch, nonce, batch, partition)
                for partition in range(self.plan.partitions)
            ]
            await self._driver(life, epoch).commit(reports, batch)
        except FAILURES:
            await self._driver(life, epoch).abort()  # Spark's hook
            raise
        await self.ask(life, "note", lambda: self.noted.add(batch))

    async def _task(
        self, life: CountingLife, epoch: int, nonce: str, batch: int, partition: int
    ) -> TaskReport:
        hint: tuple[str | None, int | None] = (QUERY, batch) if self.plan.hint else (None, None)
        tries = 2 if partition < self.plan.losers else 1
        for _ in range(tries):
            begun = await self.ask(
                life, "begin", lambda: self.coordinator.begin(epoch, nonce, *hint)
            )
            if begun is None:
                return TaskReport(nonce, partition, *hint, done=True)
            group, attempt = begun
            row = Row(batch, partition, attempt)
            await self.ask(life, "write", partial(self.rows.append, row))
        counts = {SEGMENT: RowCount(1, 7)}
        return TaskReport(nonce, partition, *hint, group, attempt, rows=1, counts=counts)

    def _driver(self, life: CountingLife, epoch: int) -> SinkDriver:
        return self.plan.driver(_Asking(self, life, epoch), _Known(), track_positions=True)

    async def ask(self, life: CountingLife, what: str, work: Callable[[], T]) -> T:
        """Let go to arrive, and again to be answered."""
        while True:
            await self.gate(life, f"{what} ...")
            try:
                answer: object = work()
            except FAILURES as error:
                answer = error
            try:
                await self.gate(life, f"... {what}")
            except ConnectionLost as error:
                life.seen.append((what, "lost"))
                if self.plan.gives_up:
                    raise OperationTimedOut("nobody has answered") from error
                continue
            life.seen.append((what, str(answer)))
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[return-value]


class _Asking:
    """`Groups`, at the coordinator of a world."""

    def __init__(self, world: World, life: CountingLife, epoch: int) -> None:
        self._world, self._life, self._epoch = world, life, epoch

    async def commit(self, decision: Decision, positions: str | None) -> bool:
        coordinator = self._world.coordinator
        return await self._world.ask(
            self._life, "commit", lambda: coordinator.commit(self._epoch, decision, positions)
        )

    async def abort(self) -> bool:
        coordinator = self._world.coordinator
        return await self._world.ask(self._life, "abort", lambda: coordinator.abort(self._epoch))


class _Known:
    """The checkpoint, which says what it is asked."""

    async def positions(self, batch: int) -> str:
        return f"up to {batch}"

    async def query(self) -> str:
        return QUERY
