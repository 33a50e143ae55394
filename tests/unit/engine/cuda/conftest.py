"""Kernels are interpreted where there is no GPU; launches can be watched."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.unit.engine.cuda import interpreted

HAS_TRITON = find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]
if HAS_TRITON and interpreted.INTERPRETED:
    interpreted.mend()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_TRITON:
        terminalreporter.write_line("tests/unit/engine/cuda was left out: Triton has no build for this machine")


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    """Kernels overflow and divide by nothing as devices do: without a word."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched from here on, in order."""
    from paceline.engine.backends.cuda import launch

    names: list[str] = []
    launched = launch.run

    def watched(compiled: Any, *others: Any, **constants: Any) -> None:
        names.append(compiled.fn.__name__)
        launched(compiled, *others, **constants)

    monkeypatch.setattr(launch, "run", watched)
    return names
