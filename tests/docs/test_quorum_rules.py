"""The table of quorum rules in docs/quorums.md: what it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "storage/ledger/bookkeeper"
TESTS = ROOT / "tests/unit/storage/ledger/bookkeeper"
ROW = re.compile(r"^\| (.+) \| `(\S+\.py)` `(\w+)` \| `(\S+\.py)` `(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/quorums.md").read_text("utf-8"))


def test_the_table_is_read() -> None:
    lines = (ROOT / "docs/quorums.md").read_text("utf-8").splitlines()
    assert len(ROWS) == sum(line.startswith("| ") for line in lines) - 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_names_in_quorum_rules_exist(row: tuple[str, str, str, str, str]) -> None:
    _, module, keeper, test_module, test = row
    assert re.search(rf"\b(def|class) {keeper}\b", (CODE / module).read_text("utf-8"))
    assert re.search(rf"\bdef {test}\b", (TESTS / test_module).read_text("utf-8"))
