"""A module that calls itself pure is: no clock, no luck, no loop, no thread, no socket.

`docs/decisions/pure-modules.md` says why the docstring is the marker.
"""

import ast
import re
from collections.abc import Iterator

import grimp
import pytest

from tests.docs.test_tidy import PACKAGES, PRODUCT, module_name, tree_of

REFUSED = {
    *("aiohttp", "asyncio", "concurrent", "grpc", "kazoo", "multiprocessing", "obstore", "random"),
    *(
        "secrets",
        "select",
        "selectors",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "threading",
        "time",
    ),
}
VALUES = {"datetime": {"now", "today", "utcnow"}, "uuid": {"getnode", "uuid1", "uuid4"}}
"""Modules of plain values, and what in them asks a clock or luck."""
FIRST_PARAGRAPH = re.compile(r'(?:#.*\n|\s)*r?"""(.*?)(?:\n\n|""")', re.DOTALL)
"""Of a module's docstring, which only comments may precede."""
WHOLE = "storage.ledger.bookkeeper."
"""Here all that a pure module stands on is pure too."""


def is_marked(source: str) -> bool:
    """Whether the first paragraph of the docstring has the word pure.

    Every worker asks this of all modules before its first test, so none is parsed for it.
    """
    first = FIRST_PARAGRAPH.match(source)
    return first is not None and re.search(r"\bpure\b", first[1], re.IGNORECASE) is not None


def _imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Of each import: the name that it binds, the package, and what is imported of that."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                yield alias.asname or root, root, ""
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, node.module.partition(".")[0], alias.name


def impure_uses(tree: ast.Module) -> Iterator[str]:
    """What is done with the outer world; to annotate with the type of what is injected is not."""
    imports = list(_imports(tree))
    refused = {name: root for name, root, _ in imports if root in REFUSED}
    values = {name: root for name, root, _ in imports if root in VALUES}
    for _, root, member in imports:
        if member in VALUES.get(root, ()):
            yield f"imports {root}.{member}"
    types = {id(part) for annotation in _annotations(tree) for part in ast.walk(annotation)}
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in types
    }
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name, root in refused.items():
        if name in used or name not in named:
            yield f"imports {root}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(base := _base(node), ast.Name):
            root = values.get(base.id, "")
            if node.attr in VALUES.get(root, ()):
                yield f"calls {node.attr} of {root}"


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns


def _base(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


PATHS = {module_name(path): path for path in PRODUCT}
PURE = sorted(module for module, path in PATHS.items() if is_marked(path.read_text("utf-8")))


def test_cores_are_marked_in_every_package() -> None:
    without = {"config", "magnetar_broker"}
    assert {module.partition(".")[0] for module in PURE} == {*PACKAGES} - without


@pytest.mark.parametrize("module", PURE)
def test_pure_module_asks_nothing_of_the_world(module: str) -> None:
    assert not list(impure_uses(tree_of(PATHS[module])))


def test_bookkeeper_cores_stand_on_pure_modules_only() -> None:
    graph = grimp.build_graph(*PACKAGES)
    cores = [module for module in PURE if module.startswith(WHOLE)]
    below = {each for core in cores for each in graph.find_upstream_modules(core)}
    found = {each: list(impure_uses(tree_of(PATHS[each]))) for each in below if each in PATHS}
    assert cores
    assert not {each: uses for each, uses in found.items() if uses}


@pytest.mark.parametrize(
    "line",
    [
        "import asyncio",
        "import asyncio.events as events",
        "from time import monotonic",
        "import random\nrng: random.Random = random.Random()",
        "from datetime import datetime\nmoment = datetime.now()",
        "import datetime\nmoment = datetime.datetime.now()",
        "from uuid import uuid4",
        "def late() -> None:\n    import socket",
    ],
)
def test_use_of_the_world_is_found(line: str) -> None:
    source = f'"""Pure: sums."""\n\n{line}\n'
    assert is_marked(source)
    assert list(impure_uses(ast.parse(source)))


@pytest.mark.parametrize(
    "lines",
    [
        "import random\n\ndef choose(rng: random.Random) -> None: ...",
        "from datetime import UTC, datetime\ntext = datetime.fromtimestamp(0, UTC).isoformat()",
        "import uuid\nKINDS = {uuid.UUID: 'uuid'}",
    ],
)
def test_type_of_what_is_injected_and_values_are_let_through(lines: str) -> None:
    assert not list(impure_uses(ast.parse(lines)))
