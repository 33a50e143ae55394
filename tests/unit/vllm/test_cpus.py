"""The helper runs where vLLM's threads do not."""

from __future__ import annotations

import os

import pytest

from paceline.core.errors import ConfigError
from paceline.service.config import parse_cpus
from paceline.vllm.helper_process import BIND_VARIABLE, free_cpus


@pytest.mark.parametrize(("text", "cpus"), [("3", {3}), ("4-6,1", {1, 4, 5, 6}), (" 0 , 2-2", {0, 2})])
def test_lists_and_ranges_are_read(text: str, cpus: set[int]) -> None:
    assert parse_cpus("cpus", text) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "1,,2", "-1", "1-2-3"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cpus must be a list of CPUs"):
        parse_cpus("cpus", text)


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 2, 3})


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("bind", "free"), [("0-1|2", {3}), ("0-3", set()), ("auto", set()), ("nobind", set()), (None, set())]
)
def test_the_cpus_of_all_ranks_are_left_alone(bind: str | None, free: set[int]) -> None:
    assert free_cpus({} if bind is None else {BIND_VARIABLE: bind}) == free


@pytest.mark.usefixtures("four_cpus")
def test_the_cpus_that_threads_are_bound_to_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {1})
    assert free_cpus({}) == {0, 2, 3}
