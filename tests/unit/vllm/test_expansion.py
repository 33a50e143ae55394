"""What is spread over the tokens of a request where vLLM does not do it; a function of vLLM that is right stays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.vllm.expansion import expanded, mend_expansion


def unset(x: torch.Tensor, ends: torch.Tensor, num_tokens: int, *_: object) -> torch.Tensor:
    """As the CPU build of 0.32.0 does it: nothing is written."""
    del ends
    return torch.full((num_tokens,), -9.0, dtype=x.dtype)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a vLLM with such a rejection sampler in place."""

    def put(*, is_cpu: bool = True, **names: object) -> Any:
        module = SimpleNamespace(torch=torch, **names)
        platform = SimpleNamespace(is_cpu=lambda: is_cpu)
        for name, content in {
            "vllm": SimpleNamespace(),
            "vllm.platforms": SimpleNamespace(current_platform=platform),
            "vllm.v1": SimpleNamespace(),
            "vllm.v1.sample": SimpleNamespace(rejection_sampler=module),
        }.items():
            monkeypatch.setitem(sys.modules, name, content)
        return module

    return put


def test_each_token_has_the_number_of_its_request() -> None:
    temperatures, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5])
    assert expanded(temperatures, ends, 5, replace_from=0, replace_to=1).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    spread = expanded(torch.tensor([0.0, 0.75]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1)
    assert spread.tolist() == [1.0, 0.75, 0.75]


def test_numbers_keep_their_kind() -> None:
    assert expanded(torch.tensor([3, 8]), torch.tensor([1, 3]), 3).dtype == torch.int64


def test_a_sampler_that_leaves_temperatures_unset_is_mended(sampler: Callable[..., Any]) -> None:
    module = sampler(expand_batch_to_tokens=unset)
    assert mend_expansion()
    assert module.expand_batch_to_tokens is expanded


def test_one_that_does_it_right_is_left_alone(sampler: Callable[..., Any]) -> None:
    def right(x: torch.Tensor, ends: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return expanded(x, ends, num_tokens)

    module = sampler(expand_batch_to_tokens=right)
    assert not mend_expansion()
    assert module.expand_batch_to_tokens is right


def test_elsewhere_than_on_a_cpu_nothing_is_tried(sampler: Callable[..., Any]) -> None:
    module = sampler(is_cpu=False, expand_batch_to_tokens=unset)
    assert not mend_expansion()
    assert module.expand_batch_to_tokens is unset


def test_a_vllm_that_has_other_names_starts_all_the_same(
    sampler: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    sampler()
    assert not mend_expansion()
    assert "not known" in caplog.text
