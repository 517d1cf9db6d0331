"""The file of bounds."""

import ast
from collections import Counter
from pathlib import Path

from config import bounds


def test_each_bound_has_a_name_of_its_own() -> None:
    """A second one of a name would replace the first one everywhere."""
    tree = ast.parse(Path(bounds.__file__).read_text("utf-8"))
    names = Counter(
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )
    assert [name for name, count in names.items() if count > 1] == []
