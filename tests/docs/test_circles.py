"""No file of the product imports itself by way of others, imports for types included."""

from graphlib import CycleError, TopologicalSorter

import grimp

from tests.docs.test_tidy import PACKAGES


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
        raise AssertionError(f"a circle of imports: {circle}") from None
