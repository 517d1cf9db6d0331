"""House rules that no linter knows: short functions, docstrings, no dead files or mutable state."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("config", "security", "storage", "txn", "broker", "magnetar", "magnetar_broker")
MAX_FUNCTION_LINES = 60
ENTRY_MODULES = {
    "magnetar.cli.main",
    "magnetar.cli.commands",
    "magnetar_broker.hatch_build",
    "magnetar.spark.__main__",
    "magnetar.spark.cli",
}
CORES = {"broker.replication.subscription_backlog"}
"""Of replicated subscriptions of scalable topics: proven before the shells around it are built."""


def python_files(*roots: str) -> list[Path]:
    return sorted(
        path
        for root in roots
        for path in (ROOT / root).rglob("*.py")
        if not path.name.endswith("_pb2.py") and "target" not in path.parts
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ALL = python_files(*PACKAGES, "tests", "bench", "examples", "scripts")
PRODUCT = python_files(*PACKAGES)


@cache
def tree_of(path: Path) -> ast.Module:
    """The module, parsed once for all tests."""
    return ast.parse(path.read_text("utf-8"))


def test_functions_are_short() -> None:
    long = [
        f"{path}: {name} has {lines} lines, {MAX_FUNCTION_LINES} at most: split it"
        for path in ALL
        for name, lines in function_sizes_of(path)
        if lines > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def function_sizes_of(path: Path) -> Iterator[tuple[str, int]]:
    """The name of each function, and its lines."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield node.name, node.end_lineno - node.lineno + 1


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in ALL if not says_what_it_is(path)]
    assert not silent, f"no opening docstring: {silent}"


def says_what_it_is(path: Path) -> bool:
    """Whether it begins with a docstring; empty ones of the tests need none."""
    text = path.read_text("utf-8")
    if not text.strip():
        return path.name == "__init__.py" and path.is_relative_to(ROOT / "tests")
    return bool(ast.get_docstring(tree_of(path)))


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in {"list", "dict", "set", "defaultdict", "deque", "Counter"}
    return False


def test_no_mutable_state_in_modules() -> None:
    """Upper-case dict literals count as constants; everything else that can change is state."""
    state = [each for path in PRODUCT for each in mutable_state_of(path)]
    assert not state, "\n".join(state)


def mutable_state_of(path: Path) -> Iterator[str]:
    """A sentence for each name of the module that can change, and for each `global`."""
    tree = tree_of(path)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        constant = isinstance(value, ast.Dict) and all(name.lstrip("_").isupper() for name in names)
        changes = mutable(value) or (isinstance(value, ast.Dict) and not constant)
        if changes and names != ["__all__"]:
            yield f"{path}: {names} is mutable module state"
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield f"{path} uses `global`"


def imported_modules() -> set[str]:
    found: set[str] = set()
    for path in PRODUCT:
        package = path.relative_to(ROOT).parent.parts
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = package[: len(package) - node.level + 1]
                    base = ".".join([*parts, base] if base else parts)
                found.add(base)
                found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def test_no_dead_files() -> None:
    """Every module is imported by another one of the product, or is a command's entry."""
    imported = imported_modules()
    dead = [
        name
        for path in PRODUCT
        if path.name != "__init__.py"
        and (name := module_name(path)) not in imported
        and name not in ENTRY_MODULES | CORES
    ]
    assert not dead, f"nothing imports {dead}"


def test_the_tree_holds_only_the_project() -> None:
    """No built files, and no path of the machine that it was written on."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert tracked
    assert not [name for name in tracked if name.endswith((".pyc", ".class", ".jar"))]
    foreign = ("/" + "work/", "shared" + "/peer")
    for name in tracked:
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes().decode("utf-8", "replace")
            assert not [word for word in foreign if word in text], f"{name} names a foreign path"
