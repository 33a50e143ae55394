"""Tests of real clients against a real fleet; `python -m tests.support.client_suite` runs them, nobody else does."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SERVED = json.loads(os.environ.get("PACELINE_CLIENT_SUITE_SERVED", "{}"))
if not SERVED:
    # Their packages are in an environment of their own.
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """Where the fleet serves, what, and whose tokens it speaks."""

    url: str
    grpc: str
    model: str
    folder: Path

    @property
    def v1(self) -> str:
        """What clients of OpenAI's API take for its address."""
        return f"{self.url}/v1"


def served_by(name: str) -> Served:
    """What one of the fleets serves."""
    folder = Path(SERVED[name]["model"])
    return Served(url=SERVED[name]["url"], grpc=SERVED[name]["grpc"], model=folder.name, folder=folder)


@pytest.fixture(scope="session")
def served() -> Served:
    """The demo pair, which knows no tools."""
    return served_by("demo")


@pytest.fixture(scope="session")
def queued() -> Served:
    """The demo pair with one place, whose streams soon send pings."""
    return served_by("queued")


@pytest.fixture(scope="session")
def caller() -> Served:
    """A model that reasons, and calls `get_weather`, then `add`; or both at once, if the user says so."""
    return served_by("caller")


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools that it calls, as functions."""

    calls: list[str] = field(default_factory=list)

    def get_weather(self, city: str) -> str:
        """The degrees in a city."""
        self.calls.append(f"get_weather({city!r})")
        return "20"

    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        self.calls.append(f"add({a}, {b})")
        return a + b

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls one by its name."""
        return str(getattr(self, name)(**arguments))


@pytest.fixture
def tools() -> Tools:
    return Tools()
