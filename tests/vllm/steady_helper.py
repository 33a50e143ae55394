"""The helper process with a policy that no load and no cost keeps from drafting."""

from __future__ import annotations

from paceline.core.draft_policy import FixedGamma
from paceline.vllm import helper


def main() -> None:
    helper.Goodput = lambda *, max_nodes, max_eager_batch: FixedGamma(gamma=max_nodes)
    helper.main()


if __name__ == "__main__":
    main()
