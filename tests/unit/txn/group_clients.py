"""Drivers that share one transaction key, and commit the same batches, each once.

Driver a has the key when a run begins.  Driver b opens it at any time, and driver a goes on.  Each
does its batches, whatever was committed before: it begins attempts of
a group one after the other, each of which writes a row under its id as soon as it is given; commits
with the first one that wrote, while a later one is on its way; and calls its abort hook in the end,
whatever came of it.  So every batch is committed once, by whichever driver, and shows one row.
"""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, cast

from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from tests.unit.txn.key_clients import (
    KEY,
    NAME,
    ZERO,
    Client,
    KeyWorld,
    Plan,
)
from tests.unit.txn.schedules import ACTOR, LIFE, Died, StepLoop
from txn.coordinator import Coordinator
from txn.errors import InvalidTxnStatus, TransactionKeyFenced
from txn.group import Batch, GroupCommit, GroupRecord
from txn.header import header_of
from txn.key_records import KEYS, decode_key
from txn.records import Claim, Header, TxnState
from txn.transaction_groups import BegunAttempt, CommittedGroup, TransactionGroups
from txn.transaction_key import KeyRecord, OpenedKey
from txn.transaction_keys import TransactionKeys

SEGMENT = "segment://t/n/x/0-1"


@dataclass(frozen=True)
class GroupPlan(Plan):
    """What may happen besides.

    `attempts`: which server each attempt of a driver's is begun at; `batches`: of one query, by
    each driver; `claims`: rows leave claims, which nobody
    deletes; `extends`: drivers extend their groups.
    """

    attempts: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 0), (0,))
    batches: tuple[int, int] = (1, 1)
    hints: bool = False
    aborts: tuple[bool, bool] = (True, False)
    claims: bool = False
    extends: bool = False
    groups: type[TransactionGroups] = TransactionGroups
    coordinator: type[Coordinator] = Coordinator
    projects: Callable[[Header, TxnId], Header | None] = header_of


class Driver(Client):
    """See the module's docstring."""

    def __init__(self, world: "GroupWorld", name: str, server: int, steps: int) -> None:
        super().__init__(world, name, server, steps)
        self._groups = world
        self._place = "ab".index(name)
        self.given: list[tuple[str, TxnId | str | None]] = []
        """What each attempt was answered."""

    @property
    def _plan(self) -> GroupPlan:
        return self._groups.group_plan

    async def _work(self) -> None:
        world, plan = self._groups, self._plan
        if self.name == "a":  # it has the key when a run begins
            world.store.free.add("a")
        opened = await self._open(self.name)
        world.store.free.discard("a")
        world.require_last(opened)
        try:
            for number in range(plan.batches[self._place]):
                await self._do(opened.epoch, Batch("q", number))
            self.outcome = "committed"
        finally:
            if plan.aborts[self._place]:
                await self._abort(opened.epoch)

    async def _abort(self, epoch: int) -> None:
        """The abort hook, of an epoch that may be old by then."""
        groups = self._groups
        aborted = await self._ask("abort", lambda led: groups.of(led).abort(NAME, epoch), None)
        groups.require_none_open(epoch)
        assert not (aborted and self.outcome == "committed"), "what was committed is aborted"

    async def _do(self, epoch: int, batch: Batch) -> None:
        world, nonce = self._groups, f"{self.name}{batch.number}"
        winner: TxnId | None = None
        for place, server in enumerate(self._plan.attempts[self._place]):
            work = self._attempt(epoch, nonce, batch, place, server)
            task = world.start(f"{nonce}.{place}", work)
            if winner is None:  # else it is late
                winner = await task
        if self._plan.extends and winner is not None:
            await self._extend(epoch, winner.group)
        winners = () if winner is None else (winner,)
        commit = GroupCommit(batch, str(batch.number), {each.attempt_index: {} for each in winners})
        group = None if winner is None else winner.group
        answer: CommittedGroup = await self._ask(
            "commit",
            lambda led: world.of(led).commit(NAME, epoch, nonce, group, commit, winners),
            epoch,
        )
        world.require_committed(batch, answer)

    async def _extend(self, epoch: int, group: TxnId) -> None:
        world = self._groups
        await self._ask(
            "extend", lambda led: world.of(led).extend(NAME, epoch, group, 120_000), epoch
        )

    async def _attempt(
        self, epoch: int, nonce: str, batch: Batch, place: int, server: int
    ) -> TxnId | None:
        """The attempt that wrote its row; None if it could not."""
        world, actor = self._groups, f"{nonce}.{place}"
        hint = batch if self._plan.hints else None
        begun: BegunAttempt | None
        while True:
            world.store.seen[actor] = []
            LIFE.set(world.store.life)
            try:
                groups = world.of(world.servers[server])
                begun = await groups.begin_attempt(NAME, epoch, nonce, 60_000, hint)
            except Died:
                continue
            except (TransactionKeyFenced, InvalidTxnStatus) as error:
                self.given.append((actor, type(error).__name__))
                world.require_refusal(epoch, error, batch)
                return None
            break
        self.given.append((actor, begun and begun.attempt))
        if begun is None:
            world.require_in(batch)
            return None
        world.begun(self, begun.attempt)
        return begun.attempt if await world.write(begun.attempt) else None


class GroupWorld(KeyWorld):
    """Drivers, and what must hold of groups."""

    client_class: ClassVar[type[Client]] = cast("type[Client]", Driver)

    def __init__(self, loop: StepLoop, plan: GroupPlan) -> None:
        self.group_plan = plan
        self.commits: list[tuple[Batch, TxnId]] = []
        self.rows: list[TxnId] = []
        self.written: dict[TxnId, Header] = {}
        self.nonces: dict[str, TxnId] = {}
        super().__init__(loop, plan)

    def coordinator_class(self) -> type[Coordinator]:
        plan = self.group_plan

        class Mine(plan.coordinator):  # type: ignore[misc, name-defined]
            keys_class: ClassVar[type[TransactionKeys]] = plan.keys
            groups_class: ClassVar[type[TransactionGroups]] = plan.groups

        return Mine

    def of(self, server: object) -> TransactionGroups:
        """The groups that it serves."""
        return server.groups_of(ZERO, None, KEY)[0]  # type: ignore[attr-defined, no-any-return]

    def start(self, actor: str, work: object) -> "asyncio.Task[TxnId | None]":
        """A task of its own, whose operations wait under that name."""
        token = ACTOR.set(actor)
        try:
            task = self.loop.create_task(work, name=actor)  # type: ignore[arg-type, var-annotated]
        finally:
            ACTOR.reset(token)
        self.tasks.append(task)
        return task

    async def write(self, attempt: TxnId) -> bool:
        """A row, if the owner of the segment finds the attempt open."""
        header = self.headers().get(attempt.group)
        seen = None if header is None else self.group_plan.projects(header, attempt)
        if seen is None or seen.state is not TxnState.OPEN:
            return False
        self.rows.append(attempt)
        if self.group_plan.claims:
            parts = self.servers[0]._parts
            await parts.store.put_claim(Claim(attempt, SEGMENT, 1, Position(1, len(self.rows))))
        return True

    def state(self) -> Hashable:
        memory = tuple(
            tuple(
                sorted(
                    (txn, stored.header.deadline_ms, stored.header.group is not None)
                    for txn, stored in each._led[ZERO]._open.items()
                )
            )
            + tuple(sorted((x, y.next, y.end) for x, y in each._led[ZERO].groups._indexes.items()))
            for each in self.servers
        )
        attempts = tuple(
            tuple(sorted(cast("Driver", client).given, key=lambda x: x[0]))
            for client in self.clients
        )
        seen = tuple(sorted((k, tuple(v)) for k, v in self.store.seen.items()))
        done = tuple(sorted(task.get_name() for task in self.tasks if task.done()))
        ghost = (tuple(self.commits), tuple(sorted(self.rows)))
        return (super().state(), memory, attempts, seen, done, ghost)

    # What must hold

    def record(self) -> KeyRecord | None:
        """The key as it is stored."""
        for key in self.store._tables._records:
            if key.startswith(KEYS):
                record = self.store._tables.record(key)
                assert record is not None
                return decode_key(key, record.value)
        return None

    def told(self) -> GroupRecord | None:
        """The last commit, by the key and the header of its last transaction."""
        record, headers = self.record(), self.headers()
        if record is None:
            return None
        header = None if record.last is None else headers.get(record.last.txn)
        if record.last is not None and header is not None and header.state is TxnState.COMMITTED:
            commit = None if header.group is None else header.group.commit
            if commit is not None:
                return GroupRecord(commit.batch, commit.positions, record.last.txn)
        return record.committed

    def _last(self) -> GroupRecord | None:
        if not self.commits:
            return None
        batch, group = self.commits[-1]
        return GroupRecord(batch, str(batch.number), group)

    def require_last(self, opened: OpenedKey) -> None:
        """OPEN tells the last commit."""
        if opened.epoch == self.newest_answered:
            assert opened.committed == self._last(), (
                f"OPEN of epoch {opened.epoch} told {opened.committed}, and it is {self._last()}"
            )

    def require_in(self, batch: Batch) -> None:
        """Told that it is done, it is."""
        assert any(each >= batch for each, _ in self.commits), f"{batch} was told done"

    def require_committed(self, batch: Batch, answer: CommittedGroup) -> None:
        """Told that it is committed, it is, by that group."""
        self.require_in(batch)
        if answer.group is not None:
            assert (batch, answer.group) in self.commits, f"{answer.group} has not {batch}"
        record = self.record()
        named = None if record is None or record.transaction is None else record.transaction.txn
        header = None if named is None else self.headers().get(named)
        if header is not None and header.group is not None and answer.done:
            nonce = f"{'ab'[0]}{batch.number}", f"{'ab'[1]}{batch.number}"
            assert header.state is not TxnState.OPEN or header.group.nonce not in nonce, (
                f"{named} is left open though {batch} was told done"
            )

    def require_none_open(self, epoch: int) -> None:
        """After an abort under that epoch."""
        for txn, header in self.headers().items():
            assert (
                txn not in self.named
                or header.state is not TxnState.OPEN
                or header.key_epoch is None
                or header.key_epoch.epoch != epoch
            ), f"{txn} is open after an abort"

    def require_refusal(self, epoch: int, error: Exception, batch: Batch) -> None:
        """A driver that holds the key is refused nothing that it needs."""
        if epoch == self.newest_answered and epoch == self.newest_made[0]:
            assert any(each == batch for each, _ in self.commits), f"refused {batch}: {error}"

    def begun(self, client: Client, txn: TxnId) -> None:
        super().begun(client, txn)
        group = self.written[txn.group].group
        assert group is not None, f"{txn} is of a plain transaction"
        assert group.is_reserved(txn.attempt_index), f"{txn} was given, and is not reserved"
        first = self.nonces.setdefault(group.nonce, txn.group)
        assert first == txn.group, f"nonce {group.nonce} has groups {first} and {txn.group}"

    def ended(self, txn: TxnId, header: Header, actor: str) -> None:
        before, self.written[txn] = self.written.get(txn), header
        state = TxnState.OPEN if before is None else before.state
        if state is not TxnState.OPEN and state is not header.state:
            self.wrong.append(f"{txn} went from {state} to {header.state}")
        if before is not None and header.deadline_ms < before.deadline_ms:
            self.wrong.append(f"the deadline of {txn} fell")
        assert header.key_epoch is not None, "all are of the key"
        epochs = {name: epoch for epoch, name in self.answered.items()}
        if txn in self.named and header.key_epoch.epoch > epochs.get(
            actor[:1], header.key_epoch.epoch
        ):
            self.wrong.append(f"{actor}, of an older epoch, changed {txn}")
        if header.state is not TxnState.COMMITTED or state is TxnState.COMMITTED:
            return
        super().ended(txn, header, actor)
        if header.group is not None:
            assert header.group.commit is not None, "it is committed for a batch"
            self.commits.append((header.group.commit.batch, txn))

    def check(self) -> None:
        self.done.clear()  # not one transaction, but one for each batch
        super().check()
        batches = [batch for batch, _ in self.commits]
        assert len(set(batches)) == len(batches), f"a batch was committed twice: {batches}"
        assert self.told() == self._last(), f"the key tells {self.told()}, not {self._last()}"
        headers = self.headers()
        for batch, group in self.commits:
            header = headers.get(group)
            if header is None or header.group is None or header.group.commit is None:
                continue
            shown = [
                each
                for each in self.rows
                if each.group == group
                and (seen := self.group_plan.projects(header, each)) is not None
                and seen.state is TxnState.COMMITTED
            ]
            assert len(shown) == len(header.group.commit.winners), f"{batch} shows {shown}"
        if self.group_plan.claims:
            for each in self.rows:
                assert each.group in headers, f"{each.group} is gone, and a claim of {each} is left"

    def finish(self) -> None:
        assert all(task.done() for task in self.tasks), "somebody waits for ever"
        newest = self.answered[self.newest_answered]
        (last,) = (each for each in self.clients if each.name == newest)
        assert last.outcome == "committed", f"{last.name} has the newest epoch, {last.outcome}"
        want = self.group_plan.batches["ab".index(newest)]
        assert len(self.commits) >= want, f"{self.commits} of {want} batches"
