"""The table of broken rules in docs/testing.md: it says which story and which seed find each."""

import re
from pathlib import Path
from typing import Final

from tests.simulation.mutants import MUTANTS

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs/testing.md").read_text("utf-8")
ROW: Final = re.compile(
    r"^\| ([WATKGCBLSM]\d+(?:-\w+)?) \| [^|]+ \| `(\w+)` \| (?:`([\w-]+)`, (\d+)|no: [^|]+) \|$",
    re.MULTILINE,
)
SHOWN_HERE: Final = {
    *(f"W{number}" for number in range(1, 15)),
    *(f"A{number}" for number in range(1, 10)),
    *(f"T{number}" for number in range(1, 4)),
    *(f"B{number}" for number in range(1, 9)),
    *(f"L{number}" for number in range(1, 10)),
    *(f"S{number}" for number in range(1, 5)),
    *(f"M{number}" for number in range(1, 6)),
}
"""The other rules are shown in every schedule, in `tests/unit/txn`."""


def test_the_table_says_what_finds_each_broken_rule() -> None:
    written = [
        (name, story, profile, int(seed or 1)) for name, story, profile, seed in ROW.findall(PAGE)
    ]
    assert written == [(each.name, each.story, each.profile, each.seed) for each in MUTANTS]


def test_every_rule_that_is_shown_here_is_broken() -> None:
    broken = {rule for each in MUTANTS for rule in re.findall(r"[WATBLSM]\d+", each.name)}
    assert broken == SHOWN_HERE
