"""docs/architecture.md: the modules that it names exist, and it names each module of its rooms.

Rules of the page: a section's heading begins with the directories that it is about.  The first
column of a table names modules; one without a directory is beside the one before it in its row.
"""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs/architecture.md").read_text("utf-8")
ROOMS: Final = {
    "protocol": ("protocol",),
    "storage/metadata": ("storage/metadata",),
    "storage/ledger": ("storage/ledger", "storage/ledger/local"),
    "storage/metadata/oxia": ("storage/metadata/oxia", "storage/metadata/zookeeper"),
    "storage/ledger/bookkeeper": ("storage/ledger/bookkeeper",),
    "storage": ("storage",),
    "storage/offload": ("storage/offload",),
    "txn": ("txn",),
    "broker": ("broker", "broker/dispatch"),
    "broker/placement": ("broker/placement",),
    "broker/scalable": ("broker/scalable",),
    "magnetar": ("magnetar", "magnetar/wire"),
    "pipeline": ("pipeline",),
}
"""What a section's heading begins with, and the directories whose modules it must name."""
TREES: Final = ("config", "protocol", "storage", "txn", "broker", "magnetar", "pipeline", "tests")
HEADING: Final = re.compile(r"^## ([a-z_/]+)\b", re.MULTILINE)
MODULE: Final = re.compile(r"`([\w/]+\.py)`")


def sections() -> dict[str, str]:
    """The text of each section that is about a room."""
    parts = re.split(r"^(?=## )", PAGE, flags=re.MULTILINE)
    return {found[1]: part for part in parts if (found := HEADING.match(part)) is not None}


SECTIONS: Final = sections()


def first_column(line: str) -> str:
    """Of a table's row; nothing of another line."""
    return line.partition(" | ")[0] if line.startswith("| ") else ""


def rows(section: str) -> list[list[str]]:
    """The modules in the first column of each table row, with the directory they are beside."""
    found = []
    for line in section.splitlines():
        beside, names = "", []
        for name in MODULE.findall(first_column(line)):
            beside = name.rpartition("/")[0] or beside
            names.append(f"{beside}/{name.rpartition('/')[2]}".lstrip("/"))
        found.append(names)
    return found


def directories(room: str) -> list[Path]:
    """Where a module that a section names may be."""
    parents = [Path(room).parent if room.count("/") > 1 else Path(room)]
    return [ROOT / each for each in (*ROOMS[room], *parents)]


def test_every_room_has_a_section() -> None:
    assert set(SECTIONS) == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_modules_that_are_named_exist(room: str) -> None:
    named = [name for row in rows(SECTIONS[room]) for name in row]
    assert named
    missing = [
        name for name in named if not any((each / name).is_file() for each in directories(room))
    ]
    assert not missing
    elsewhere = set(MODULE.findall(SECTIONS[room])) - set(named)
    files = [f"/{path.relative_to(ROOT)}" for tree in TREES for path in (ROOT / tree).rglob("*.py")]
    assert not [one for one in elsewhere if not any(path.endswith(f"/{one}") for path in files)]


@pytest.mark.parametrize(
    ("room", "directory"), [(room, each) for room, held in ROOMS.items() for each in held]
)
def test_modules_are_named(room: str, directory: str) -> None:
    """In a table of their section, in its other text, or anywhere by their whole path."""
    section = SECTIONS[room]
    named = {each / name for row in rows(section) for name in row for each in directories(room)}
    firsts = {name for line in section.splitlines() for name in MODULE.findall(first_column(line))}
    named |= {ROOT / directory / name for name in set(MODULE.findall(section)) - firsts}
    named |= {ROOT / name for name in MODULE.findall(PAGE)}
    unnamed = [
        path.name
        for path in sorted((ROOT / directory).glob("*.py"))
        if path.name != "__init__.py" and not path.name.endswith("_pb2.py") and path not in named
    ]
    assert not unnamed, f"docs/architecture.md does not name {unnamed} of {directory}"
