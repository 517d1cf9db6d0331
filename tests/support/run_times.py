"""How long tests took and how they failed, out of the JUnit files that pytest writes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

REASON_CHARACTERS: Final = 1_000
"""Longer reasons of a failure are cut."""


class UnreadableTimes(Exception):
    """A file of times is not what pytest writes, as when its process was killed."""


@dataclass(frozen=True)
class TestTime:
    """Seconds of one test, its fixtures included."""

    __test__ = False
    place: str
    """Its module and, if it is in one, its class, with dots between."""
    name: str
    seconds: float
    skipped: bool = False
    failure: str = ""
    """What pytest says of why it failed; empty if it did not."""

    @property
    def folder(self) -> str:
        """`tests/FOLDER`, or `tests/unit/FOLDER`."""
        names = self._modules()[:-1]
        return "/".join(names[: 3 if names[1:2] == ["unit"] else 2])

    def __str__(self) -> str:
        modules = self._modules()
        classes = self.place.split(".")[len(modules) :]
        return "::".join(["/".join(modules) + ".py", *classes, self.name])

    def _modules(self) -> list[str]:
        return [name for name in self.place.split(".") if not name[:1].isupper()]


def read_times(junit: Path) -> list[TestTime]:
    """Read the times of all tests in the file; none if there is no such file."""
    if not junit.exists():
        return []
    try:
        cases = ElementTree.parse(junit).iter("testcase")
    except ElementTree.ParseError as error:
        raise UnreadableTimes(f"{junit} is damaged ({error}): run the part again.") from error
    return [
        TestTime(
            place,
            case.get("name", ""),
            float(case.get("time", "0")),
            skipped=case.find("skipped") is not None,
            failure=_failure(case),
        )
        for case in cases
        if "." in (place := case.get("classname", ""))
    ]


def _failure(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return " ".join(found.get("message", "").split()) or kind
    return ""


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"


def lines_by_folder(times: Iterable[TestTime], least_s: float) -> Iterator[str]:
    """A line for each folder whose tests took so long, all workers together, the longest first."""
    by_folder: defaultdict[str, list[float]] = defaultdict(list)
    for each in times:
        by_folder[each.folder].append(each.seconds)
    for folder, seconds in sorted(by_folder.items(), key=lambda item: -sum(item[1])):
        if sum(seconds) >= least_s:
            yield f"{clock(sum(seconds))}  {len(seconds):6,d} tests  {folder}"


def lines_of_slowest(times: Iterable[TestTime], count: int) -> Iterator[str]:
    """A line for each of the slowest tests, the slowest first."""
    for each in sorted(times, key=lambda time: -time.seconds)[:count]:
        yield f"{each.seconds:7.1f} s  {each}"


def lines_of_failed(times: Iterable[TestTime]) -> Iterator[str]:
    """A line for each test that failed, with why."""
    for each in times:
        if each.failure:
            yield f"{each}: {each.failure[:REASON_CHARACTERS]}"
