"""No module of the package needs itself, by whatever way: imports inside functions and for type checkers count."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp


def test_no_modules_import_one_another_in_a_circle():
    graph = grimp.build_graph("paceline", cache_dir=None)
    # To become empty.
    for importer, imported in [("paceline.obs.tracing", "paceline.obs.otlp")]:
        graph.remove_import(importer=importer, imported=imported)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
