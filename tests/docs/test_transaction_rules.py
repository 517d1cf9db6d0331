"""The rules of transactions: each is told, kept in a named place, and has tests."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "transactions.md").read_text("utf-8")
RULES = [
    *(f"W{number}" for number in range(1, 15)),
    *(f"A{number}" for number in range(1, 10)),
    *(f"T{number}" for number in range(1, 4)),
    *(f"K{number}" for number in range(1, 9)),
    *(f"G{number}" for number in range(1, 10)),
    *(f"L{number}" for number in range(1, 10)),
]
CITATION = re.compile(r"\b[WATKGL][1-9]\d?\b")
CODE = re.compile(r"`([^`]+)`")


def rows(heading: str) -> list[list[str]]:
    """The cells of every row of the table with that first line."""
    _, found, rest = DOCUMENT.partition(heading + "\n")
    assert found, f"docs/transactions.md has no table {heading}"
    lines = []
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            break
        lines.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return lines


SAID = rows("| rule | says | without it |")
KEPT = {row[0]: row[1:] for row in rows("| rule | kept by | falls without it |")}
TRAPS = rows("| trap | tests |")


def parsed(path: Path) -> ast.Module:
    assert path.is_file(), f"{path} is named in docs/transactions.md and is not there"
    return ast.parse(path.read_text("utf-8"))


def definition(place: str) -> tuple[ast.Module, ast.AST]:
    """The module and the function that `package.module.Class.method` names."""
    parts = place.split(".")
    depth = next(
        n
        for n in range(len(parts), 0, -1)
        if (ROOT / Path(*parts[:n])).with_suffix(".py").is_file()
    )
    module = parsed((ROOT / Path(*parts[:depth])).with_suffix(".py"))
    found: ast.AST = module
    for name in parts[depth:]:
        inside = [
            node
            for node in ast.iter_child_nodes(found)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == name
        ]
        assert inside, f"{place} is named in docs/transactions.md and is not there"
        found = inside[0]
    return module, found


def cited(text: str | None) -> set[str]:
    return set(CITATION.findall(text or ""))


def require_test(name: str) -> None:
    path, _, function = name.partition("::")
    folder = ROOT / "tests" if path.startswith("contract/") else ROOT / "tests" / "unit"
    module = parsed(folder / path)
    assert any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
        for node in module.body
    ), f"there is no test {name}"


def test_every_rule_is_told_once_with_what_goes_wrong_without_it() -> None:
    assert [row[0] for row in SAID] == RULES
    assert all(len(row) == 3 and all(row) for row in SAID)
    assert [row[0] for row in rows("| rule | kept by | falls without it |")] == RULES


@pytest.mark.parametrize("rule", RULES)
def test_the_place_that_keeps_a_rule_cites_it(rule: str) -> None:
    places = CODE.findall(KEPT[rule][0])
    assert places
    for place in places:
        module, function = definition(place)
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        texts = cited(ast.get_docstring(module)) | cited(ast.get_docstring(function))
        assert rule in texts, f"{place} keeps {rule} and does not say so"


@pytest.mark.parametrize("rule", RULES)
def test_the_tests_of_a_rule_exist(rule: str) -> None:
    tests = CODE.findall(KEPT[rule][1])
    assert tests
    for name in tests:
        require_test(name)


@pytest.mark.parametrize("row", TRAPS, ids=[row[0] for row in TRAPS])
def test_the_tests_of_a_trap_exist(row: list[str]) -> None:
    tests = CODE.findall(row[1])
    assert tests
    for name in tests:
        require_test(name)


@pytest.mark.parametrize("path", sorted((ROOT / "txn").glob("*.py")), ids=lambda path: path.name)
def test_no_unknown_rule_is_cited(path: Path) -> None:
    unknown = cited(path.read_text("utf-8")) - set(RULES)
    assert not unknown, f"{path} cites {sorted(unknown)}, not in docs/transactions.md"
