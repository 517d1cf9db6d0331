"""`StateTable`: the allowed moves between states.  Pure."""

import enum
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

S = TypeVar("S", bound=enum.Enum)


class StateTable(Mapping[S, frozenset[S]]):
    """Maps each state of an enum to the states that may follow it; immutable.

    `defect` is the class of the error for a move that is not listed, which is a defect of the
    owner.  Raises `ValueError` if a state of the enum is missing.
    """

    __slots__ = ("_defect", "_next")

    def __init__(self, next_states: Mapping[S, Collection[S]], *, defect: type[Exception]) -> None:
        missing = {state for known in next_states for state in type(known)} - next_states.keys()
        if missing:
            raise ValueError(f"Say which states may follow {missing}: none is an answer too.")
        # Tuples are searched by identity; a set would call the enum's hash, which is Python code.
        self._next = {state: tuple(after) for state, after in next_states.items()}
        self._defect = defect

    def __getitem__(self, state: S) -> frozenset[S]:
        return frozenset(self._next[state])

    def __iter__(self) -> Iterator[S]:
        return iter(self._next)

    def __len__(self) -> int:
        return len(self._next)

    def move(self, now: S, to: S, who: str, *named: object) -> S:
        """Return `to` if it may follow `now`; raise the table's error otherwise.

        `who` names the owner, as the beginning of a sentence.  `named` fill its braces only when
        the error is raised, so that an allowed move formats nothing.
        """
        if to not in self._next[now]:
            raise self._defect(
                f"{who.format(*named)} cannot go from {_words(now)} to {_words(to)}: "
                "report this as a defect."
            )
        return to


def _words(state: enum.Enum) -> str:
    return state.name.lower().replace("_", " ")
