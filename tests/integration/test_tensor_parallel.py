"""One model on two ranks, each a process of its own, over gloo: the same logits, the same promises, one end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FleetSpec
from paceline.config import load
from paceline.core.draft_policy import FixedGamma
from paceline.core.params import EAGLE3, LAYER_SKIP, MEDUSA, SamplingParams, SpeculationParams
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from tests.integration.test_local_fleet import FREE_PORTS, SMALL, children, gone
from tests.support.checkpoints import save_pair
from tests.support.eagle import save_eagle3
from tests.support.engines import EnginePair
from tests.support.heads import random_medusa, save_medusa
from tests.support.ranks import RankZero, rank_zero
from tests.unit.engine.tiny_models import (
    FAMILIES,
    NUM_BLOCKS,
    PROMPT,
    SCRATCH,
    TABLE,
    TinyModel,
    assert_prompt_and_tree_match,
    branch,
    chain,
    greedy,
    pack,
    save_tiny,
)

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True),
}
PLAIN = SpeculationParams(enabled=False)


@pytest.fixture(scope="module")
def place() -> Iterator[RankZero]:
    with rank_zero() as place:
        yield place


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.fixture(scope="module")
def cut(place: RankZero, model: TinyModel) -> Decoder:
    """The model on both ranks."""
    return place.load(model.folder)


def test_logits_of_prompts_chunks_single_rows_and_trees_equal_transformers(cut: Decoder, model: TinyModel) -> None:
    assert_prompt_and_tree_match(cut, model)


def test_every_kind_of_call_gives_what_one_rank_gives(cut: Decoder, model: TinyModel) -> None:
    whole = model.load()
    for expected, found in zip(calls(whole), calls(cut), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def calls(decoder: Decoder) -> list[torch.Tensor]:
    """Logits after accepted nodes were copied into place, of some layers alone, of the head alone, and of no row."""
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:30]), [TABLE]), cache)
    decoder.forward(pack(branch(PROMPT[30:35], 30, SCRATCH[:5]), [TABLE]), cache)
    targets = [TABLE[position // 16] * 16 + position % 16 for position in range(30, 35)]
    cache.copy_slots(np.array(SCRATCH[:5], dtype=np.int64), np.array(targets, dtype=np.int64))
    after = decoder.forward(pack(chain(PROMPT[35:38], 35), [TABLE]), cache)
    some = decoder.forward(pack(chain(PROMPT[38:40], 38), [TABLE]), cache, (0, 2))
    hidden = torch.from_numpy(np.random.default_rng(1).standard_normal((700, 48), dtype=np.float32))
    none = decoder.forward(pack(chain(PROMPT[38:40], 38), [TABLE], []), cache)
    return [after, some, decoder.head(hidden), none]


def test_greedy_tokens_are_those_of_one_rank(cut: Decoder, model: TinyModel) -> None:
    expected = model.generate(PROMPT[:11], 12)
    assert greedy(cut, cut.new_cache(NUM_BLOCKS), PROMPT[:11], 12, TABLE) == expected


def test_a_rank_holds_half_of_the_weights_and_of_the_kv(cut: Decoder, model: TinyModel) -> None:
    whole = model.load()
    assert cut.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=0.02)
    assert 2 * cut.new_cache(8).nbytes == whole.new_cache(8).nbytes


def test_a_row_has_the_same_bits_in_any_company(cut: Decoder) -> None:
    def rows(*cuts: int) -> torch.Tensor:
        cache: KVCache = cut.new_cache(NUM_BLOCKS)
        spans = zip((0, *cuts), (*cuts, 45), strict=True)
        return torch.cat([cut.forward(pack(chain(PROMPT[first:last], first), [TABLE]), cache) for first, last in spans])

    single = rows(*range(38, 45))
    assert torch.equal(rows(), single)
    assert torch.equal(rows(7, 30, 40), single)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


Texts = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def texts(place: RankZero, pair: tuple[Path, Path]) -> Texts:
    """Tokens of a few sessions at once, from an engine on both ranks."""
    decoder = place.load(pair[0])

    def run(sampling: SamplingParams, speculation: SpeculationParams | None = None, **options) -> list[list[int]]:
        engines = EnginePair(*pair, decoder=decoder, policy=FixedGamma(gamma=4), width=3, **options)
        for index, length in enumerate((1, 5, 33)):
            engines.submit(f"s{index}", [(7 * index + 3 * at) % 250 for at in range(length)], sampling, speculation)
        engines.run()
        if speculation is None:
            records = [each.result.speculation for each in engines.sessions.values() if each.result is not None]
            assert min(record.num_draft_tokens for record in records) > 0, "every session was drafted for"
        return [each.token_ids for each in engines.sessions.values()]

    return run


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_way_to_draft_leaves_the_tokens_of_two_ranks_alone(
    texts: Texts, pair: tuple[Path, Path], sampling: str, tmp_path: Path
) -> None:
    heads = save_medusa(tmp_path / "medusa", random_medusa(), num_heads=3, num_blocks=1)
    eagle = save_eagle3(tmp_path / "eagle", pair[0], layer_ids=(0, 0, 0), draft_vocab=200)
    plain = texts(SAMPLINGS[sampling], PLAIN)
    assert texts(SAMPLINGS[sampling]) == plain
    assert texts(SAMPLINGS[sampling], methods=(MEDUSA, LAYER_SKIP), medusa_model=heads) == plain
    assert texts(SAMPLINGS[sampling], methods=(EAGLE3,), eagle3_model=eagle) == plain


@pytest.mark.parametrize(("number", "silence_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 1.0)])
def test_a_rank_that_dies_or_falls_silent_is_missed_though_nothing_is_asked_of_it(
    number: signal.Signals, silence_s: float
) -> None:
    with rank_zero(silence_s=silence_s) as place:
        place.process.send_signal(number)
        assert place.lost.wait(60)
        assert "rank 1 of the tensor parallel model is gone or silent" in str(place.losses[0])


async def stream(fleet: LocalFleet, on_first: Callable[[], None]) -> str:
    """The text of a sampled completion; tells of its first piece."""
    body = {"model": fleet.model_name, "prompt": "hello", "max_tokens": 200, "temperature": 0.8, "seed": 5}
    text = ""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=300) as client,
        client.stream(
            "POST", f"{fleet.gateway_url}/v1/completions", json={**body, "stream": True, "ignore_eos": True}
        ) as response,
    ):
        assert response.status_code == httpx.codes.OK
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not text:
                    on_first()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def test_the_death_of_a_rank_is_the_verifiers_and_its_session_goes_on(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    argv = [*FREE_PORTS, *SMALL, "--no-drafter", "--model", str(pair[0]), "--log-dir", str(tmp_path)]
    argv += [
        "--verifier-arg=--tensor-parallel-size=2",
        "--gateway-arg=--failover-s=300",
        "--gateway-arg=--verifier-silence-s=300",
    ]
    async with LocalFleet(load(FleetSpec, argv, {}, "up", ""), environ=os.environ) as fleet:
        expected = await stream(fleet, lambda: None)
        [rank] = children(fleet.pid("verifier-0"))

        def kill() -> None:
            # A step that is under way cannot end before the rank does.
            os.kill(rank, signal.SIGSTOP)
            os.kill(rank, signal.SIGKILL)

        assert await stream(fleet, kill) == expected
        assert fleet.restart_count("verifier") == 1
        assert "of the tensor parallel model is gone or silent" in (tmp_path / "verifier-0.log").read_text()
        [successor] = children(fleet.pid("verifier-0"))
        os.kill(fleet.pid("verifier-0"), signal.SIGKILL)
        await gone(successor)
