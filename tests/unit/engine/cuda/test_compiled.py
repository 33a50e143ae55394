"""What kernels become on GPUs that nobody has to have: they are compiled for sm80, sm89 and sm90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# Of what a program may take on sm89, the least of all.
MOST_SHARED_BYTES = 99 * 1024
SAMPLER = {"_find_maxima", "_add_masses", "_choose"}
LAYER = {"_attend", "_join", "_add_norm", "_rope_store", "_silu_mul", "_move"}
BESIDE = {"_go_down"}


@pytest.fixture(
    scope="module",
    # A minute each where kernels have changed; the interpreter's tests run in make test.
    params=[pytest.param(capability, marks=pytest.mark.full) for capability in (90, 80, 89)],
    ids=lambda capability: f"sm{capability}",
)
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the compiler says of each kernel; what has not changed it finds in pytest's own cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = (sys.executable, "-m", "tests.unit.engine.cuda.compiled", str(request.param))
    ended = subprocess.run(command, env=environment, cwd=request.config.rootpath, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_kernels_compile_and_spill_nothing(compiled: list[dict[str, Any]]) -> None:
    assert {each["kernel"] for each in compiled} == SAMPLER | LAYER | BESIDE
    assert [each for each in compiled if each["spilled_bytes"]] == []
    assert [each for each in compiled if each["shared_bytes"] > MOST_SHARED_BYTES] == []


def test_no_product_of_the_sampler_is_fused_with_a_sum(compiled: list[dict[str, Any]]) -> None:
    assert [each for each in compiled if each["fused"] and each["kernel"] in SAMPLER] == []
    assert any(each["fused"] for each in compiled if each["kernel"] in LAYER), "nothing is ever found"
