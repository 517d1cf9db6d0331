"""House rules that no linter knows: lengths, docstrings, no dead files, no mutable module state."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("config", "protocol", "storage", "txn", "broker", "magnetar", "pipeline")
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60
ENTRY_MODULES = {
    "broker.cli.main",
    "broker.cli.commands",
    "magnetar.cli.commands",
    "pipeline.__main__",
    "pipeline.cli",
}


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


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", ALL, ids=ids)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES, f"{path} is too long: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", ALL, ids=ids)
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text("utf-8")
    if not text.strip():
        assert path.name == "__init__.py"
        assert path.is_relative_to(ROOT / "tests")
        return
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, f"{path} has no opening docstring"


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in {"list", "dict", "set", "defaultdict", "deque", "Counter"}
    return False


@pytest.mark.parametrize("path", PRODUCT, ids=ids)
def test_no_mutable_state_in_modules(path: Path) -> None:
    """Upper-case dict literals count as constants; everything else that can change is state."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names == ["__all__"]:
            continue
        assert not mutable(value), f"{path}: {names} is mutable module state"
        if isinstance(value, ast.Dict):
            assert all(name.lstrip("_").isupper() for name in names), f"{path}: {names}"
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        assert not isinstance(node, ast.Global), f"{path} uses `global`"


def imported_modules() -> set[str]:
    found: set[str] = set()
    for path in PRODUCT:
        package = path.relative_to(ROOT).parent.parts
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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
        and name not in ENTRY_MODULES
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
