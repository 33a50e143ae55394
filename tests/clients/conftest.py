"""Tests of real clients against a real fleet; `python -m tests.support.client_suite` runs them, nobody else does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

_URL = os.environ.get("PACELINE_CLIENT_SUITE_URL", "")
if not _URL:
    # Their packages are in an environment of their own.
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """Where the fleet serves, what, and whose tokens it speaks."""

    url: str
    model: str
    folder: Path

    @property
    def v1(self) -> str:
        """What clients of OpenAI's API take for its address."""
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def served() -> Served:
    folder = Path(os.environ["PACELINE_CLIENT_SUITE_MODEL"])
    return Served(url=_URL, model=folder.name, folder=folder)
