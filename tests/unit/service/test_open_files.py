"""The limit of open files is raised to what the system allows."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from paceline.service.process import open_files_limit, raise_open_files_limit, run


@pytest.fixture(autouse=True)
def low_limit() -> Iterator[int]:
    """A soft limit below the hard one, as shells set it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def limit() -> int:
    return open_files_limit()


def test_every_service_may_open_as_many_files_as_the_system_allows(low_limit: int) -> None:
    assert open_files_limit() == low_limit - 1
    assert run(limit()) == low_limit


def test_a_system_that_refuses_leaves_the_limit_as_it_was(low_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_open_files_limit()
    assert open_files_limit() == low_limit - 1
