"""Helper processes that tests script, for whatever speaks to them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.vllm import tier_client

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def scripted_helpers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Helpers do what `SCRIPTED_HELPER` names, and the installed vLLM has a version and nothing else."""
    monkeypatch.setattr(tier_client, "HELPER_MODULE", "tests.support.scripted_helper")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "services"), str(ROOT)]))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0+cpu"))
