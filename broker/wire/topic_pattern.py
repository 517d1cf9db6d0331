r"""Matching of topic names with a client's pattern, in time linear in the name.

Clients send Java patterns and anybody may send one, so no backtracking engine may run them: a
pattern becomes a non-deterministic automaton, and the sets of states that names lead to are cached.
Supported are literals, `.`, classes, `\d \w \s` and their complements, `\Q...\E`, groups, `|`,
`* + ? {m,n}` (lazy and possessive marks change nothing: a whole name is matched), and `^ $` at the
ends of the pattern.  Anything else is refused.
"""

import asyncio
import string
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import ClassVar

from config.bounds import (
    COMPILED_PATTERNS,
    MAX_PATTERN_CHARACTERS,
    MAX_PATTERN_STATES,
    PATTERN_CACHED_STATES,
    PATTERN_PART_CHARACTERS,
    TURN_S,
)
from magnetar.protocol.server_error import PeerError, ServerError

Test = Callable[[str], bool]
States = frozenset[int]
_DIGITS = frozenset(string.digits)
_WORD = frozenset(string.ascii_letters + string.digits + "_")
_SPACE = frozenset(" \t\n\r\f\v")
_ESCAPES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_SPECIAL = frozenset(".[](){}*+?|^$\\")


class UnsupportedPattern(PeerError):
    """The pattern is wrong, too long, or uses what is not supported here: simplify it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class _Fragment:
    """A piece of the automaton: its first state, and the states that lead out of it."""

    __slots__ = ("ends", "start")

    def __init__(self, start: int, ends: list[int]) -> None:
        self.start = start
        self.ends = ends


class TopicPattern:
    """A compiled pattern.  Raises `UnsupportedPattern`."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise UnsupportedPattern(
                f"The pattern has {len(pattern)} characters: {MAX_PATTERN_CHARACTERS} are the most."
            )
        builder = _Builder(pattern)
        fragment = builder.whole()
        self._tests = builder.tests
        self._next = builder.next
        self._final = builder.state(None)
        for end in fragment.ends:
            self._next[end].append(self._final)
        self._start = self._closure({fragment.start})
        self._steps: dict[tuple[States, str], States] = {}
        self.cached_states = 0
        """States in all sets that are kept."""

    def matches(self, name: str) -> bool:
        """Whether the pattern matches all of `name`."""
        return self.accepts(self.advance(self.start, name))

    @property
    def start(self) -> States:
        """The states before the first character."""
        return self._start

    def accepts(self, states: States) -> bool:
        """Whether a name that led to these states matches."""
        return self._final in states

    def advance(self, states: States, text: str) -> States:
        """The states after some more characters of a name; none if it cannot match any more."""
        for character in text:
            key = (states, character)
            known = self._steps.get(key)
            if known is None:
                known = self._step(states, character)
                size = len(known) + 1
                if self.cached_states + size > PATTERN_CACHED_STATES:
                    self._steps.clear()
                    self.cached_states = 0
                self.cached_states += size
                self._steps[key] = known
            if not known:
                return known
            states = known
        return states

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        reached: set[int] = set()
        for state in states:
            test = self._tests[state]
            if test is not None and test(character):
                reached.update(self._next[state])
        return self._closure(reached)

    def _closure(self, states: set[int]) -> frozenset[int]:
        """The states reached without a character."""
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if self._tests[state] is None:
                for following in self._next[state]:
                    if following not in states:
                        states.add(following)
                        waiting.append(following)
        return frozenset(states)


@lru_cache(COMPILED_PATTERNS)
def compiled(pattern: str) -> TopicPattern:
    """A pattern, compiled now or kept from an earlier use.  Raises `UnsupportedPattern`."""
    # Clients may bring any number of patterns, so their watches keep only the texts.
    return TopicPattern(pattern)


async def select(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches; the loop serves others after each TURN_S.

    Raises `UnsupportedPattern`.
    """
    automaton, found = compiled(pattern), []
    clock = time.perf_counter
    until = clock() + TURN_S
    for name in names:
        states = automaton.start
        for first in range(0, len(name), PATTERN_PART_CHARACTERS):
            states = automaton.advance(states, name[first : first + PATTERN_PART_CHARACTERS])
            if clock() >= until:
                await asyncio.sleep(0)
                until = clock() + TURN_S
        if automaton.accepts(states):
            found.append(name)
    return found


class _Builder:
    """Recursive descent over a pattern, one automaton state for each thing that takes a character.

    A state without a test takes none.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self.tests: list[Test | None] = []
        self.next: list[list[int]] = []

    def state(self, test: Test | None) -> int:
        """Add a state; returns its number."""
        if len(self.tests) >= MAX_PATTERN_STATES:
            raise self._wrong("repeats too much")
        self.tests.append(test)
        self.next.append([])
        return len(self.tests) - 1

    def whole(self) -> _Fragment:
        """Parse the whole pattern."""
        fragment = self._alternatives()
        if self._at < len(self._pattern):
            raise self._wrong("has a parenthesis too many")
        return fragment

    def _alternatives(self) -> _Fragment:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        start = self.state(None)
        self.next[start] = [branch.start for branch in branches]
        return _Fragment(start, [end for branch in branches for end in branch.ends])

    def _sequence(self) -> _Fragment:
        start = self.state(None)
        fragment = _Fragment(start, [start])
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            fragment = self._join(fragment, self._repeated())
        return fragment

    def _join(self, first: _Fragment, second: _Fragment) -> _Fragment:
        for end in first.ends:
            self.next[end].append(second.start)
        return _Fragment(first.start, second.ends)

    def _repeated(self) -> _Fragment:
        begin = self._at
        fragment = self._atom()
        while self._at < len(self._pattern) and self._pattern[self._at] in "*+?{":
            least, most = self._quantifier()
            end = self._at
            fragment = self._times(begin, least, most)
            self._at = end
            if not self._take("?"):
                self._take("+")
            begin_of_more = self._at
            if begin_of_more < len(self._pattern) and self._pattern[begin_of_more] in "*{":
                raise self._wrong("repeats a repetition")
            break
        return fragment

    def _quantifier(self) -> tuple[int, int | None]:
        character = self._pattern[self._at]
        self._at += 1
        if character != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        close = self._pattern.find("}", self._at)
        inside = self._pattern[self._at : close] if close >= 0 else ""
        least, comma, most = inside.partition(",")
        if not least.isdecimal() or (most and not most.isdecimal()) or len(inside) > 9:
            raise self._wrong("has a wrong repetition in braces")
        self._at = close + 1
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None

    def _times(self, begin: int, least: int, most: int | None) -> _Fragment:
        """Repeat the atom at `begin`.  It is parsed again for each repetition."""
        if most is not None and most < least:
            raise self._wrong("has a repetition that ends before it begins")
        start = self.state(None)
        fragment = _Fragment(start, [start])
        for _ in range(least):
            fragment = self._join(fragment, self._atom_at(begin))
        if most is None:
            loop = self.state(None)
            body = self._atom_at(begin)
            self.next[loop].append(body.start)
            for end in body.ends:
                self.next[end].append(loop)
            return self._join(fragment, _Fragment(loop, [loop]))
        ends = list(fragment.ends)
        for _ in range(most - least):
            fragment = self._join(fragment, self._atom_at(begin))
            ends += fragment.ends
        return _Fragment(fragment.start, ends)

    def _atom_at(self, begin: int) -> _Fragment:
        self._at = begin
        return self._atom()

    def _atom(self) -> _Fragment:
        character = self._pattern[self._at]
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return self._taking(self._class())
        if character == ".":
            return self._taking(lambda _: True)
        if character == "\\":
            return self._escape()
        if character in "^$":
            if self._at not in (1, len(self._pattern)):
                raise self._wrong("has an anchor in its middle")
            return self._empty()
        if character in _SPECIAL:
            raise self._wrong(f"has {character!r} where it means nothing")
        return self._literal(character)

    def _group(self) -> _Fragment:
        if self._take("?") and not self._take(":"):
            raise self._wrong("has a look-around, a named group or inline flags")
        fragment = self._alternatives()
        if not self._take(")"):
            raise self._wrong("has a group without end")
        return fragment

    def _escape(self) -> _Fragment:
        if self._take("Q"):
            close = self._pattern.find("\\E", self._at)
            end = close if close >= 0 else len(self._pattern)
            fragment = self._empty()
            for character in self._pattern[self._at : end]:
                fragment = self._join(fragment, self._literal(character))
            self._at = end + 2 if close >= 0 else end
            return fragment
        return self._taking(self._escaped())

    def _escaped(self) -> Test:
        """Parse what follows a backslash, in or out of a class."""
        if self._at >= len(self._pattern):
            raise self._wrong("ends with a backslash")
        character = self._pattern[self._at]
        self._at += 1
        if character.lower() in _ESCAPES:
            members = _ESCAPES[character.lower()]
            wanted = character.islower()
            return lambda other: (other in members) is wanted
        if character.isalnum():
            raise self._wrong(f"has \\{character}, which is not supported here")
        return lambda other: other == character

    def _class(self) -> Test:
        negated = self._take("^")
        tests: list[Test] = []
        first = True
        while first or not self._take("]"):
            if self._at >= len(self._pattern):
                raise self._wrong("has a class without end")
            first = False
            tests.append(self._class_member())
        return lambda other: any(test(other) for test in tests) is not negated

    def _class_member(self) -> Test:
        low = self._pattern[self._at]
        self._at += 1
        if low == "\\":
            return self._escaped()
        if low == "[" or self._pattern.startswith("&&", self._at - 1):
            raise self._wrong("has a class of classes")
        following = self._pattern[self._at : self._at + 2]
        if len(following) == 2 and following[0] == "-" and following[1] not in "]\\":
            high = following[1]
            self._at += 2
            return lambda other: low <= other <= high
        return lambda other: other == low

    def _literal(self, character: str) -> _Fragment:
        return self._taking(lambda other: other == character)

    def _taking(self, test: Test) -> _Fragment:
        state = self.state(test)
        return _Fragment(state, [state])

    def _empty(self) -> _Fragment:
        state = self.state(None)
        return _Fragment(state, [state])

    def _take(self, expected: str) -> bool:
        if self._pattern.startswith(expected, self._at):
            self._at += len(expected)
            return True
        return False

    def _wrong(self, problem: str) -> UnsupportedPattern:
        return UnsupportedPattern(f"The pattern {self._pattern!r} {problem}: simplify it.")
