"""The helper runs where vLLM's threads do not."""

from __future__ import annotations

import os

import pytest

from paceline.vllm.helper_process import BIND_VARIABLE, free_cpus


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
