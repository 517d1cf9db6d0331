"""The table of advisories in docs/security.md names all tests; `test_pages` has each exist."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ADVISORIES: Final = 29
_TEST: Final = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
_ROW: Final = re.compile(r"^\| (\d{4}-\d+[^|]*) \|[^|]*\| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[str, set[str]]:
    """The tests of each advisory."""
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    section = page.partition("## Advisories of Apache Pulsar\n")[2].partition("\n## ")[0]
    return {
        advisory: set(re.findall(r"`(\w+)`", tests))
        for advisories, tests in _ROW.findall(section)
        for advisory in advisories.split(", ")
    }


def names_of_tests() -> set[str]:
    """The names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in _TEST.findall(file.read_text("utf-8"))}


def test_every_advisory_has_a_test_with_its_number() -> None:
    assert len(rows()) >= ADVISORIES
    for advisory, named in rows().items():
        wanted = set(advisory.split("-"))
        numbers = [set(re.findall(r"\d+", name)) for name in named if name.startswith("test_cve_")]
        assert any(wanted <= each for each in numbers), advisory


def test_every_test_of_an_advisory_is_in_the_table() -> None:
    named = {name for name in names_of_tests() if name.startswith("test_cve_")}
    assert named - set().union(*rows().values()) == set()
