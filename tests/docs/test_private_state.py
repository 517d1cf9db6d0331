"""What docs/decisions/tests-and-private-state.md lists is what the tests do."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = (ROOT / "docs/decisions/tests-and-private-state.md").read_text()


def expanded(pattern: str) -> list[str]:
    """The paths of a pattern with at most one list in braces."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", pattern)
    if match is None:
        return [pattern]
    before, names, after = match.groups()
    return [f"{before}{name}{after}" for name in names.split(",")]


def exempted() -> list[str]:
    """Files below tests/ in which ruff allows private attributes."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    return [
        path
        for pattern, rules in lint["per-file-ignores"].items()
        if "SLF001" in rules and not pattern.startswith("!")
        for path in expanded(pattern)
    ]


def recorded() -> list[str]:
    """Files that the record lists: `folder`: `name`, `name`."""
    found = []
    for folder, names in re.findall(
        r"^  - `(tests/\S+)`: ((?:`\w+`(?:,\s+)?)+)", RECORD, re.MULTILINE
    ):
        found += [f"{folder}/{name}.py" for name in re.findall(r"`(\w+)`", names)]
    return found


def test_record_lists_the_files_that_ruff_exempts() -> None:
    assert sorted(recorded()) == sorted(exempted())
    assert [path for path in exempted() if not (ROOT / path).is_file()] == []


def test_exempted_files_use_private_attributes() -> None:
    used = re.compile(r"(?<!\bself)(?<!\bcls)\._[a-zA-Z]")
    assert [path for path in exempted() if not used.search((ROOT / path).read_text())] == []


def test_record_lists_the_bounds_that_tests_patch() -> None:
    patched = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'(?:set_bound|setattr)\(\s*\w+,\s*"([A-Z_]+)"', path.read_text())
    }
    chapter = RECORD.partition("## Bounds that tests patch")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([A-Z_]+)`", chapter))
    assert listed == patched
