"""What worlds of drivers have in common: drivers that wait at gates, die and are started again.

A world lets a driver do what Spark does.  Before each request, and where it matters before the
answer, the driver waits at a gate until the explorer lets it go.  One that is killed there is
started again as the next life of the same driver; one that is never let go on is frozen.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from magnetar.errors import TransactionKeyFenced
from tests.unit.txn.schedules import Choice, StepLoop


@dataclass
class Gate:
    """Somebody waits here."""

    actor: str
    what: str
    go: "asyncio.Future[None]"


@dataclass
class Life:
    """One run of a driver, from its start to its end or death."""

    name: str
    task: "asyncio.Task[None] | None" = None
    outcome: str = ""
    seen: list[object] = field(default_factory=list)
    """What it was answered."""


L = TypeVar("L", bound=Life)


class DriverWorld(ABC, Generic[L]):
    """See the module's docstring.  Its drivers are A, B and so on; their lives A0, A1, ..."""

    FAILURES: ClassVar[tuple[type[Exception], ...]]
    """What ends a query."""

    def __init__(self, loop: StepLoop, drivers: int, left: dict[str, int]) -> None:
        """`left`: how often each choice but `go` may still be made."""
        self.loop = loop
        self.left = left
        self.gates: list[Gate] = []
        self.lives: dict[str, L] = {}
        self.noted: set[int] = set()
        """`commits/` of the checkpoint."""
        for number in range(drivers):
            self._start("AB"[number])
        self.loop.settle()

    @abstractmethod
    def life(self, name: str) -> L:
        """A new one."""

    @abstractmethod
    async def run(self, life: L) -> None:
        """All that a driver does."""

    @property
    @abstractmethod
    def may_fail(self) -> bool:
        """Whether a query may fail though nobody has opened its key, and is started again."""

    @abstractmethod
    def loss(self) -> Exception:
        """What comes in place of an answer that is lost."""

    # What the explorer asks

    def deaths(self) -> list[Choice]:
        """Each driver that may be killed now."""
        return [("kill", gate.actor) for gate in self.gates] if self.left["kill"] else []

    def do(self, choice: Choice) -> None:
        kind, actor = str(choice[0]), str(choice[1])
        if kind != "go":
            self.left[kind] -= 1
        self.happen(kind, actor)
        self.loop.settle()

    def happen(self, kind: str, actor: str) -> None:
        """To who waits at a gate: `go`, `kill` or `lose`."""
        gate = next(gate for gate in self.gates if gate.actor == actor)
        self.gates.remove(gate)
        if kind == "go":
            gate.go.set_result(None)
        elif kind == "lose":
            gate.go.set_exception(self.loss())
        else:
            assert kind == "kill", kind
            self._kill(self.lives[actor])

    def outcomes(self) -> Sequence[tuple[object, ...]]:
        """For the state of the world: what became of each life, and what it was answered."""
        return tuple((life.name, life.outcome, tuple(life.seen)) for life in self.lives.values())

    def waiting(self) -> Sequence[tuple[str, str]]:
        """For the state of the world: who waits before what."""
        return tuple(sorted((gate.actor, gate.what) for gate in self.gates))

    def finish(self) -> None:
        outcomes = {life.name: life.outcome for life in self.lives.values()}
        assert all(outcomes.values()), f"somebody waits for ever: {outcomes}"
        assert not [one for one in outcomes.values() if "AssertionError" in one], outcomes
        # Who opened the key last is fenced by nobody.
        assert "done" in outcomes.values(), f"nobody has finished: {outcomes}"

    def close(self) -> None:
        for life in self.lives.values():
            if life.task is not None:
                life.outcome = life.outcome or "closed"
                life.task.cancel()
        self.loop.settle()

    # What a driver does

    async def gate(self, life: L, what: str) -> None:
        """Wait until it is let go.  Raises what `loss` makes."""
        if life.outcome:
            raise asyncio.CancelledError  # a dead process asks for nothing
        gate = Gate(life.name, what, self.loop.create_future())
        self.gates.append(gate)
        await gate.go

    def _start(self, name: str) -> None:
        life = self.life(f"{name}{sum(other[0] == name for other in self.lives)}")
        self.lives[life.name] = life
        life.task = self.loop.create_task(self._live(life))

    def _kill(self, life: L) -> None:
        assert life.task is not None
        life.outcome = "killed"
        life.task.cancel()
        self.loop.settle()
        self.gates = [each for each in self.gates if each.actor != life.name]
        self._start(life.name[0])

    async def _live(self, life: L) -> None:
        ends: tuple[type[Exception], ...] = (AssertionError, *self.FAILURES)
        try:
            await self.run(life)
            life.outcome = "done"
        except ends as error:
            if life.outcome:
                return
            life.outcome = f"{type(error).__name__}: {error}"
            if self.may_fail and not isinstance(error, TransactionKeyFenced | AssertionError):
                self._start(life.name[0])
