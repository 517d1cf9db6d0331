"""docs/architecture.md and the READMEs of packages: they name what exists, and every module.

Rules of these pages: a README names each module of its folder, and of the folders below that have
no README.  In a row of a table a name without a folder is beside the one before it.  The traces of
`architecture.md` name a function as `path.py::Class.method`, in a link to its file.
"""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs/architecture.md").read_text("utf-8")
PACKAGES: Final = ("broker", "config", "magnetar", "storage", "txn")
"""Each has a README, so that none of their modules is without one."""
READMES: Final = tuple(
    sorted(path for package in PACKAGES for path in (ROOT / package).rglob("README.md"))
)
NAME: Final = re.compile(r"`(?!test_)([\w/]+\.py)`")
TRACED: Final = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def readme_of(module: Path) -> Path:
    """The README of its folder, or of the nearest one above it."""
    return next(each / "README.md" for each in module.parents if (each / "README.md").exists())


def modules_of(readme: Path) -> set[Path]:
    return {
        path
        for path in readme.parent.rglob("*.py")
        if path.name != "__init__.py"
        and not path.name.endswith("_pb2.py")
        and readme_of(path) == readme
    }


def resolve(readme: Path) -> tuple[set[Path], set[str]]:
    """The modules that a README names, and the names that are of none."""
    found, missing = set(), set()
    for line in readme.read_text("utf-8").splitlines():
        folder = ""
        for name in NAME.findall(line):
            folder = name.rpartition("/")[0] or folder
            beside = f"{folder}/{name.rpartition('/')[2]}".lstrip("/")
            places = (ROOT / name, readme.parent / beside, readme.parent / name)
            path = next((each for each in places if each.is_file()), None)
            if path is None:
                missing.add(name)
            else:
                found.add(path)
    return found, missing


def functions_of(module: Path) -> set[str]:
    """Classes and functions of a module, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(module.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_every_package_has_a_readme() -> None:
    assert {ROOT / each / "README.md" for each in PACKAGES} <= set(READMES)


@pytest.mark.parametrize("readme", READMES, ids=ids)
def test_a_readme_names_modules_that_exist(readme: Path) -> None:
    found, missing = resolve(readme)
    assert found
    assert not missing


@pytest.mark.parametrize("readme", READMES, ids=ids)
def test_a_readme_names_every_module(readme: Path) -> None:
    unnamed = sorted(map(ids, modules_of(readme) - resolve(readme)[0]))
    assert not unnamed, f"{ids(readme)} does not name {unnamed}"


def test_the_picture_lists_every_readme() -> None:
    linked = {
        (ROOT / "docs" / target).resolve()
        for target in re.findall(r"\]\(([^)#]+README\.md)\)", PAGE)
    }
    assert set(READMES) <= linked


def test_functions_of_the_traces_exist() -> None:
    traced = TRACED.findall(PAGE)
    assert len(traced) > 30, "hardly a function was found: has the form of the page changed?"
    unknown = [f"{path}::{name}" for path, name in traced if name not in functions_of(ROOT / path)]
    assert not unknown


def test_a_traced_function_links_to_its_file() -> None:
    links = re.findall(r"\[`([\w/]+\.py)::[\w.]+`\]\(\.\./([\w/]+\.py)\)", PAGE)
    assert len(links) == len(TRACED.findall(PAGE))
    assert not [(path, target) for path, target in links if path != target]


def test_places_to_change_exist() -> None:
    (section,) = re.findall(r"^## Where do I change X\n(.+?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([\w/]+/[\w/.]*)`", section)
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists()]
