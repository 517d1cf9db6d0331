"""Breadth first through every state of a model, to the shortest run that breaks a promise.

A model is moves from state to state, and promises about states.  A label that begins with "!" is a
fault: it may happen and need not.  A state that only faults leave is at rest, and judged as an end.
Every other move makes progress; that no run goes round in a circle is shown as well, so "each rest
is as it should be" says that everything ends well, if only whatever can go on does.
"""

import sys
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """What is explored."""

    def start(self) -> S:
        """The first state."""
        ...

    def moves(self, state: S) -> Iterable[tuple[str, S]]:
        """What may happen next, each with its label."""
        ...

    def broken(self, before: S, after: S) -> str | None:
        """The promise that this move breaks."""
        ...

    def wrong(self, state: S) -> str | None:
        """The promise that this state breaks, however it came about.  Asked once of each."""
        ...

    def unfinished(self, state: S) -> str | None:
        """The promise that a state at rest breaks."""
        ...


@dataclass(frozen=True, slots=True)
class Explored:
    """What was found.  `run`: the labels that lead to `problem`, none of them avoidable."""

    states: int
    rests: int
    problem: str | None = None
    run: Sequence[str] = ()

    def __str__(self) -> str:
        if self.problem is None:
            return f"{self.states:,} states, {self.rests:,} at rest: clean"
        steps = "".join(f"\n  {number}. {label}" for number, label in enumerate(self.run, 1))
        return f"{self.states:,} states: {self.problem}{steps}"


class _Search(Generic[S]):
    """States are known by their 64-bit hashes, so that millions fit: see the README."""

    def __init__(self, model: Model[S], limit: int) -> None:
        self._model = model
        self._limit = limit
        self._numbers: dict[int, int] = {}
        self._before = array("q")
        self._labels: list[str] = []
        self._edges, self._firsts = array("q"), array("q")
        self._rests = 0

    def run(self) -> Explored:
        layer = [self._model.start()]
        self._number(hash(layer[0]), -1, "")
        problem = self._model.wrong(layer[0])
        if problem is not None:
            return self._told(problem, 0, "")
        while layer:
            following: list[S] = []
            for state in layer:
                found = self._look(state, following)
                if found is not None:
                    return found
            layer = following
        circle = self._in_circles()
        problem = f"{circle:,} states lie on or behind a circle" if circle else None
        return Explored(len(self._numbers), self._rests, problem)

    def _look(self, state: S, following: list[S]) -> Explored | None:
        model, at, is_rest = self._model, len(self._firsts), True
        self._firsts.append(len(self._edges))
        for label, after in model.moves(state):
            is_rest = is_rest and label[0] == "!"
            problem = model.broken(state, after)
            known = hash(after)
            number = self._numbers.get(known)
            if number is None:
                number = self._number(known, at, label)
                following.append(after)
                problem = problem or model.wrong(after)
            if problem is not None:
                return self._told(problem, at, label)
            self._edges.append(number)
        if len(self._numbers) > self._limit:
            return self._told(f"more than {self._limit:,} states: not finished", 0, "")
        if is_rest:
            self._rests += 1
            problem = model.unfinished(state)
            if problem is not None:
                return self._told(f"at rest: {problem}", at, "")
        return None

    def _number(self, known: int, before: int, label: str) -> int:
        number = len(self._numbers)
        self._numbers[known] = number
        self._before.append(before)
        self._labels.append(sys.intern(label))
        return number

    def _told(self, problem: str, at: int, last: str) -> Explored:
        run = [last] if last else []
        while at > 0:
            run.append(self._labels[at])
            at = self._before[at]
        return Explored(len(self._numbers), self._rests, problem, run[::-1])

    def _in_circles(self) -> int:
        firsts, edges = self._firsts, self._edges
        firsts.append(len(edges))
        into = array("i", bytes(4 * len(self._numbers)))
        for number in edges:
            into[number] += 1
        ready, left = [0], len(into)
        while ready:
            left -= 1
            at = ready.pop()
            for number in edges[firsts[at] : firsts[at + 1]]:
                into[number] -= 1
                if not into[number]:
                    ready.append(number)
        return left


def explore(model: Model[S], limit: int = 20_000_000) -> Explored:
    """Every state, or the shortest run to a broken promise."""
    return _Search(model, limit).run()
