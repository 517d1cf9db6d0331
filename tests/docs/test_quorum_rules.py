"""The table of quorum rules in docs/quorums.md: what it names exists, and cites the rule."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "storage/ledger/bookkeeper"
TESTS = ROOT / "tests/unit/storage/ledger/bookkeeper"
ROW = re.compile(
    r"^\| (Q\d+) \| .+ \| `(\S+\.py)` `(\w+)` \| `(\S+\.py)` `(\w+)` \|$", re.MULTILINE
)


class Rule(NamedTuple):
    number: str
    module: str
    keeper: str
    test_module: str
    test: str


RULES = [Rule(*row) for row in ROW.findall((ROOT / "docs/quorums.md").read_text("utf-8"))]


def keepers_of(rule: Rule) -> list[str]:
    """The source of each function or class of that name."""
    text = (CODE / rule.module).read_text("utf-8")
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [
        ast.get_source_segment(text, node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and node.name == rule.keeper
    ]


def test_the_table_is_read() -> None:
    lines = (ROOT / "docs/quorums.md").read_text("utf-8").splitlines()
    assert len(RULES) == sum(line.startswith("| ") for line in lines) - 1
    assert [rule.number for rule in RULES] == [f"Q{place}" for place in range(1, len(RULES) + 1)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.number)
def test_the_keeper_of_a_rule_cites_it(rule: Rule) -> None:
    assert any(re.search(rf"# .*\b{rule.number}\b", source) for source in keepers_of(rule))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.number)
def test_the_test_of_a_rule_exists(rule: Rule) -> None:
    text = (TESTS / rule.test_module).read_text("utf-8")
    assert re.search(rf"\bdef {rule.test}\b", text)
