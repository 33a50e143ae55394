"""What is spread over a request's tokens where vLLM does not."""

from __future__ import annotations

import torch

from paceline.vllm.expansion import expanded


def test_each_token_has_the_number_of_its_request() -> None:
    temperatures, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5])
    assert expanded(temperatures, ends, 5, replace_from=0, replace_to=1).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert expanded(torch.tensor([0.0, 0.7]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1).tolist() == (
        torch.tensor([1.0, 0.7, 0.7]).tolist()
    )


def test_numbers_keep_their_kind() -> None:
    assert expanded(torch.tensor([3, 8]), torch.tensor([1, 3]), 3).dtype == torch.int64
