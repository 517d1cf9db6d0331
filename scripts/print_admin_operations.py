"""Print `docs/pulsar-admin.md`: each operation of Pulsar's admin library, and what it does here.

The page is made from `tests/java/admin_operations.json`.  Its `operations` are what the library
itself got from this broker, as `tests/java/test_admin_operations.py` records them; `tests` names
the tests that show an effect, with patterns for the operations they show; `without_effect` has the
reasons of those that are taken and change nothing.  `--take FILE` takes over what a run has
recorded.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, cast

ROOT: Final = Path(__file__).parent.parent
TABLE: Final = ROOT / "tests" / "java" / "admin_operations.json"
PAGE: Final = ROOT / "docs" / "pulsar-admin.md"
LIBRARY: Final = "pulsar-client-admin-original 5.0.0-M1"
ANSWERED: Final = "answered"
REFUSED: Final = "refused"
NOT_FOUND: Final = re.compile(r"[A-Z]+ /\S*: (Not Found|Method Not Allowed)\. See /admin/v2 ")
"""A reason that only says that there is no such path."""
_HEAD: Final = f"""\
# Operations of pulsar-admin

Each operation of Apache Pulsar's own admin library ({LIBRARY}), which
`pulsar-admin` is made of, and what it does on this broker. The list is made from the library:
`tests/java/test_admin_operations.py` calls each operation, and fails if one is missing here or is
answered in another way. Print the page with `python -m scripts.print_admin_operations`.

- **works**: the named test shows the effect;
- **answered**: the library reads the answer, and no test of its effect is named;
- **no effect**: it is taken and changes nothing, for the reason given;
- **refused**: the HTTP status, and the reason that the broker gives. *not served yet*: there is no
  such path.

An operation whose name ends in `Async` does what its twin does. *global* is `topicPolicies(true)`,
as `--global` of the command line.

"""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the library, and what it got from the broker."""

    interface: str
    method: str
    """With the types of its parameters."""
    outcome: str
    status: int | None = None
    reason: str | None = None

    @property
    def name(self) -> str:
        """Interface and method without parameters."""
        return f"{self.interface}.{self.method.partition('(')[0]}"

    @property
    def full_name(self) -> str:
        """Interface and method with parameters."""
        return f"{self.interface}.{self.method}"

    def is_named(self, pattern: str) -> bool:
        """Whether a pattern with or without parameters names it."""
        return fnmatchcase(self.full_name if "(" in pattern else self.name, pattern)

    @property
    def is_without_path(self) -> bool:
        """Whether it was refused as there is no such path."""
        return self.outcome == REFUSED and bool(NOT_FOUND.match(self.reason or ""))


@dataclass(frozen=True, slots=True)
class Table:
    """The committed table."""

    operations: Sequence[Operation]
    tests: Mapping[str, Sequence[str]]
    without_effect: Mapping[str, str]

    def tests_of(self, operation: Operation) -> Sequence[str]:
        """The tests that show the operation's effect."""
        return [
            test
            for test, patterns in self.tests.items()
            if any(operation.is_named(each) for each in patterns)
        ]


def table() -> Table:
    """Read the committed table."""
    found = json.loads(TABLE.read_text("utf-8"))
    return Table(operations_in(found["operations"]), found["tests"], found["without_effect"])


def operations_in(rows: Sequence[Mapping[str, object]]) -> Sequence[Operation]:
    """The operations of a recorded list."""
    return [
        Operation(
            str(row["interface"]),
            str(row["method"]),
            str(row["outcome"]),
            cast("int | None", row.get("status")),
            cast("str | None", row.get("reason")),
        )
        for row in rows
    ]


def take(recorded: Path) -> None:
    """Put a recorded list into the table."""
    found = json.loads(TABLE.read_text("utf-8"))
    found["operations"] = json.loads(recorded.read_text("utf-8"))
    TABLE.write_text(_text_of(found), "utf-8")


def _text_of(found: Mapping[str, object]) -> str:
    """The table as JSON, with a line for each operation."""
    rows = cast("Sequence[object]", found["operations"])
    lines = ",\n".join(json.dumps(row) for row in rows)
    rest = json.dumps({name: found[name] for name in ("tests", "without_effect")}, indent=1)
    return f'{{\n"operations": [\n{lines}\n],{rest[1:-2]}\n}}\n'


def page() -> str:
    """The text of the page."""
    return _HEAD + "".join(_sections(table()))


def _sections(found: Table) -> Iterator[str]:
    kinds = [_kind(found, each) for each in found.operations]
    yield "| | operations |\n|---|---|\n"
    for kind in dict.fromkeys(sorted(kinds)):
        yield f"| {kind} | {kinds.count(kind)} |\n"
    interface = None
    for operation, kind in zip(found.operations, kinds, strict=True):
        if operation.interface != interface:
            interface = operation.interface
            yield f"\n## {interface}\n\n| operation | here | test, or why |\n|---|---|---|\n"
        yield f"| `{operation.method}` | {kind} | {_why(found, operation)} |\n"


def _kind(found: Table, operation: Operation) -> str:
    if operation.outcome != ANSWERED:
        return f"{operation.outcome} {operation.status or ''}".strip()
    if operation.full_name in found.without_effect:
        return "no effect"
    return "works" if found.tests_of(operation) else ANSWERED


def _why(found: Table, operation: Operation) -> str:
    if operation.outcome == ANSWERED:
        tests = [f"`{test.rpartition('::')[2]}`" for test in found.tests_of(operation)]
        return found.without_effect.get(operation.full_name) or ", ".join(tests)
    if operation.is_without_path:
        return "not served yet"
    return (operation.reason or "").replace("|", r"\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print docs/pulsar-admin.md.")
    parser.add_argument("--take", type=Path, metavar="FILE", help="what a run has recorded")
    recorded = parser.parse_args().take
    if recorded is not None:
        take(recorded)
    PAGE.write_text(page(), "utf-8")
