"""A `vllm serve` of each kind for all tests of this folder: plain, with the tier, with a helper that always drafts.

They run side by side on one core, of which those that nobody asks take nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import widened_demo_target
from tests.vllm.servers import STEADY_PROPOSER, Drafter, Vllm, vllm


@pytest.fixture(scope="session", autouse=True)
def ends_with_us() -> None:
    """A signal to end reaches the fixtures: a vLLM that nobody stops would live on."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("asked to end"))


@pytest.fixture(scope="session")
def target() -> Path:
    """The demo target widened to 98 M: with the small one no draft would pay."""
    return widened_demo_target(os.environ, print)


@pytest.fixture(scope="session")
def prompts(target: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    return [list(tokenizer.encode(prompt).ids) for prompt in unseen_prompts(40)]


@pytest.fixture(scope="session")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    with vllm(target, tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    drafter = Drafter(tmp_path_factory.mktemp("drafter"))
    drafter.start()
    try:
        yield drafter
    finally:
        drafter.stop()


@pytest.fixture(scope="session")
def tiered(target: Path, drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """vLLM with the tier as it is served."""
    with vllm(target, tmp_path_factory.mktemp("tier"), drafter.address) as server:
        yield server


@pytest.fixture(scope="session")
def steady(target: Path, drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """vLLM with a tier that drafts whether it pays or not; its answers say what was drafted for them."""
    more = ["--per-request-spec-decode-metrics", "detailed"]
    with vllm(target, tmp_path_factory.mktemp("steady"), drafter.address, STEADY_PROPOSER, more) as server:
        yield server
