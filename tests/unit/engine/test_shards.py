"""Cutting a model among ranks: which models, which parts, and sums that depend on nothing but their summands.

Here the ranks are threads of one process, each with groups of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from paceline.core.errors import ConfigError, UnavailableError
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig
from paceline.engine.identity import weights_hash
from paceline.engine.loading import load_decoder
from paceline.engine.ranks import Ranks
from paceline.engine.rendezvous import RankFacts, Rendezvous, listen
from paceline.engine.sharded_backend import Call, dismiss, follow, pack_call, unpack_call
from paceline.engine.shards import check_shares
from tests.unit.engine.tiny_models import FAMILIES, SIZES, TinyModel, assert_prompt_and_tree_match, save_tiny

HOST = "127.0.0.1"
ResultT = TypeVar("ResultT")


def meet(all_facts: list[RankFacts], work: Callable[[Rendezvous, int], ResultT]) -> list[ResultT]:
    """Runs the work of every rank, once they have met, each in a thread; rank 0's error first."""
    listener = listen(HOST, 0)
    port = listener.getsockname()[1]

    def run(rank: int) -> ResultT:
        rendezvous = Rendezvous(HOST, port, rank, listener if rank == 0 else None)
        rendezvous.meet(all_facts[rank], join_s=20.0)
        return work(rendezvous, rank)

    with ThreadPoolExecutor(len(all_facts)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(all_facts))]
        return [future.result() for future in futures]


def on_ranks(size: int, work: Callable[[Ranks], ResultT]) -> list[ResultT]:
    def run(rendezvous: Rendezvous, rank: int) -> ResultT:
        ranks = Ranks(rendezvous, rank=rank, size=size, device=torch.device("cpu"), on_lost=lambda _: None)
        try:
            return work(ranks)
        finally:
            ranks.stop()

    return meet([RankFacts(size=size, model="m", device="cpu")] * size, run)


def check_on_ranks(model: TinyModel, size: int) -> None:
    def work(ranks: Ranks) -> None:
        decoder = load_decoder(model.folder, "float32", ranks=ranks)
        if ranks.rank:
            follow(decoder, ranks)
            return
        try:
            assert_prompt_and_tree_match(decoder, model)
        finally:
            dismiss(ranks)

    on_ranks(size, work)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_four_ranks_share_two_kv_heads(family: str, tiny: Callable[[str], TinyModel]) -> None:
    check_on_ranks(tiny(family), 4)


def test_a_sum_has_the_same_bits_on_every_rank_and_for_any_number_of_rows() -> None:
    whole = torch.randn((4, 70, 33), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)

    def work(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.sum(whole[ranks.rank, :count]) for count in (70, 1, 17)]

    sums = on_ranks(4, work)
    in_order = ((whole[0].float() + whole[1]) + whole[2]) + whole[3]
    for every, first, some in sums:
        assert torch.equal(every, in_order)
        assert torch.equal(first, in_order[:1])
        assert torch.equal(some, in_order[:17])


def test_messages_of_any_length_and_arguments_of_every_kind_arrive() -> None:
    arguments = [
        torch.arange(count, dtype=kind).reshape(-1, 1).numpy()
        for kind in (torch.int64, torch.int32, torch.float32)
        for count in (0, 3, 5001)
    ]

    def work(ranks: Ranks) -> list[str]:
        said = [pack_call(Call.HEAD, arguments[:index]) for index in range(len(arguments) + 1)]
        if ranks.rank == 0:
            for message in said:
                ranks.tell(message)
            return []
        heard = [unpack_call(ranks.hear()) for _ in said]
        assert all(call is Call.HEAD for call, _ in heard)
        for index, (_, found) in enumerate(heard):
            assert [each.dtype for each in found] == [each.dtype for each in arguments[:index]]
            assert all((one == other).all() for one, other in zip(found, arguments[:index], strict=True))
        return [str(len(found)) for _, found in heard]

    assert on_ranks(3, work)[2] == [str(index) for index in range(len(arguments) + 1)]


def config(**changes: object) -> DecoderConfig:
    described = {
        "model_type": "llama", "architecture": "LlamaForCausalLM", "vocab_size": 97, "context_len": 256,
        "eos_token_ids": (), "num_layers": 3, "num_heads": 12, "num_kv_heads": 4, "head_dim": 16,
    }  # fmt: skip
    return DecoderConfig(**{**described, **changes})  # type: ignore[arg-type]


def test_models_that_cannot_be_cut_equally_are_refused_by_name(tmp_path: Path) -> None:
    check_shares(config(), 2)
    check_shares(config(num_heads=24, num_kv_heads=2), 4)
    with pytest.raises(
        ConfigError, match=r"num_attention_heads: 12 cannot be shared equally.*--tensor-parallel-size 5"
    ):
        check_shares(config(), 5)
    with pytest.raises(ConfigError, match="num_key_value_heads: 4 cannot be shared equally"):
        check_shares(config(), 6)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel runs on one rank only"):
        check_shares(config(architecture="GPT2LMHeadModel"), 2)
    odd = save_tiny(tmp_path, "llama", {**SIZES, "intermediate_size": 81})
    with pytest.raises(ConfigError, match="intermediate_size: 81 cannot be shared equally"):
        check_on_ranks(odd, 2)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"model": "other"}, "rank 1 has another model than rank 0: other and m; all ranks need the same checkpoint"),
        ({"device": "cuda"}, "rank 1 has another device than rank 0"),
        ({"version": "0.0.0"}, "rank 1 has another version than rank 0"),
    ],
)
def test_ranks_of_another_model_kind_or_version_are_refused(difference: dict[str, str], message: str) -> None:
    facts = {"size": 2, "model": "m", "device": "cpu"}
    with pytest.raises(ConfigError, match=message):
        meet([RankFacts(**facts), RankFacts(**{**facts, **difference})], lambda *_: None)


def test_a_rank_that_does_not_come_or_comes_twice_is_named() -> None:
    listener = listen(HOST, 0)
    port = listener.getsockname()[1]
    facts = RankFacts(size=3, model="m", device="cpu")
    zero, one, again = (Rendezvous(HOST, port, rank, listener if not rank else None) for rank in (0, 1, 1))
    with pytest.raises(UnavailableError, match="rank 0 has not come"):
        one.meet(facts, join_s=0.0)
    with pytest.raises(UnavailableError, match=f"rank 2 has not come to {HOST}:{port} within 0 s"):
        zero.meet(facts, join_s=0.0)
    with pytest.raises(ConfigError, match="--rank 1: another rank 1 has come"):
        again.meet(facts, join_s=0.0)


def test_a_part_of_a_tensor_is_read_alone_and_its_whole_shape_is_checked(tiny: Callable[[str], TinyModel]) -> None:
    checkpoint = Checkpoint(tiny("llama").folder)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = checkpoint.tensor(name)
    assert torch.equal(checkpoint.part(name, (48, 80), 0, 12, 24), whole[12:24])
    assert torch.equal(checkpoint.part(name, (48, 80), 1, 40, 80), whole[:, 40:80])
    with pytest.raises(ConfigError, match=r"is \[48, 80\], config.json asks for \[48, 81\]"):
        checkpoint.part(name, (48, 81), 1, 0, 40)


def test_the_number_of_ranks_is_part_of_what_tells_models_apart(tiny: Callable[[str], TinyModel]) -> None:
    folder = tiny(sorted(FAMILIES)[0]).folder
    hashes = {weights_hash(folder, "float32", size) for size in (1, 2, 4)}
    assert len(hashes) == 3
    assert weights_hash(folder, "float32") in hashes
