"""Settings of ranks: what each takes of the CPUs, and what is refused before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import load
from paceline.core.errors import ConfigError
from paceline.verifier.config import VerifierConfig
from paceline.verifier.rank import RankConfig
from paceline.verifier.ranks import OtherRanks, share_cpus, split_address
from tests.unit.engine.tiny_models import SIZES, save_tiny

RANK = ("--model=m", "--tensor-parallel-size=2", "--tensor-parallel-rendezvous=10.0.0.7:29500")


def shares(size: int, threads: int, cpus: str) -> list[tuple[int, str, str]]:
    config = VerifierConfig(
        model=Path("m"), tensor_parallel_size=size, threads=threads, cpus=cpus, spare_cpus="9" if cpus else ""
    )
    parts = [share_cpus(config, rank) for rank in range(size)]
    return [(part.threads, part.cpus, part.spare_cpus) for part in parts]


def test_ranks_of_one_machine_share_threads_and_cpus() -> None:
    assert shares(2, 8, "") == [(4, "", "")] * 2
    assert shares(2, 5, "0-3,6") == [(2, "0,1", ""), (2, "2,3,6", "")]
    assert shares(3, 1, "0-1") == [(1, "0,1", "")] * 3


def test_addresses_of_a_rendezvous_are_split() -> None:
    assert split_address("10.0.0.7:29500") == ("10.0.0.7", 29500)
    assert split_address("[fd00::7]:29500") == ("fd00::7", 29500)


def test_settings_that_do_not_fit_together_are_refused_by_name() -> None:
    given = ("--model=m", "--tensor-parallel-rendezvous=10.0.0.7:29500")
    with pytest.raises(ConfigError, match="--tensor-parallel-rendezvous needs a --tensor-parallel-size of at least 2"):
        load(VerifierConfig, given, {}, "verifier", "")
    with pytest.raises(ConfigError, match="--tensor-parallel-rendezvous must be host:port"):
        load(VerifierConfig, ("--model=m", "--tensor-parallel-rendezvous=here"), {}, "verifier", "")
    with pytest.raises(ConfigError, match="--rank must be from 1 to 1, one less than --tensor-parallel-size, got 2"):
        load(RankConfig, (*RANK, "--rank=2"), {}, "rank", "")
    assert load(RankConfig, (*RANK, "--rank=1"), {}, "rank", "").rank == 1


def test_no_rank_is_started_for_a_model_that_cannot_be_cut(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", SIZES).folder
    config = VerifierConfig(model=folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="num_attention_heads: 4 cannot be shared equally among the ranks"):
        OtherRanks(config, "m")
