"""The core, and these tests of it, need no torch."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import paceline.core

ROOT = Path(__file__).parents[3]
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted({"torch", "transformers", "grpc"} & sys.modules.keys()))
"""


def test_the_core_and_its_tests_import_no_torch() -> None:
    modules = [f"paceline.core.{each.name}" for each in pkgutil.iter_modules(paceline.core.__path__)]
    tests = [f"tests.unit.core.{path.stem}" for path in Path(__file__).parent.glob("test_*.py")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'services'}:{ROOT}"}
    command = [sys.executable, "-c", IMPORT_ALL, *modules, *tests]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr, ended.stdout.strip()) == (0, "", "")
