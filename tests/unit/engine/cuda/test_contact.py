"""The parts of `make gpu-contact`, at sizes that an interpreter can do: they run, and their figures make a profile."""

from __future__ import annotations

import json

import numpy as np
import pytest
from loadtest import gpu, gpu_fleet, gpu_parts

from paceline.simulated.device import Pace, SimulatedTarget
from paceline.simulated.model import find_profile
from paceline.simulated.profile import read_profile, write_profile
from tests.unit.engine.cuda.interpreted import DEVICE, INTERPRETED
from tests.unit.engine.tiny_models import NUM_BLOCKS, PROMPT, TABLE, chain, pack

CONTACT = gpu_parts.Contact(
    device=DEVICE,
    shape="tiny",
    loads=((1, 1, 20), (2, 1, 20), (2, 1, 40)),
    sessions=(1,),
    tokens=3,
    most_rows=8,
    temperature=0.0,
    top_p=1.0,
    gamma=2,
    repeats=1,
    warm_ups=0,
)


def figures_of(part, tmp_path, monkeypatch):
    """The lines of a part; greedily, since an interpreter takes its time to draw noise."""
    monkeypatch.setattr(gpu_parts, "SAMPLED", gpu_parts.GREEDY)
    monkeypatch.setattr(gpu_parts, "RULES", {"greedy": gpu_parts.GREEDY})
    monkeypatch.setattr(gpu_parts, "LAYERS", 1)
    lines = tmp_path / "gpu.jsonl"
    monkeypatch.setenv(gpu.PART, part)
    monkeypatch.setenv(gpu.LINES, str(lines))
    gpu_parts.PARTS[part](CONTACT)
    return [json.loads(line) for line in lines.read_text().splitlines()]


def test_steps_of_both_models_make_a_profile_that_is_read_again(tmp_path, monkeypatch):
    profile = gpu.measured(figures_of("steps", tmp_path, monkeypatch))
    assert profile is not None
    assert profile.target.rows == profile.drafter.rows == (1, 2)
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json").target.seconds == profile.target.seconds


def test_rounds_with_the_drafter_inside_give_the_texts_of_plain_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_parts, "CONTEXT", 6)
    (figure,) = figures_of("rounds", tmp_path, monkeypatch)
    assert figure["same_texts"]


@pytest.mark.parametrize("part", ["attention", "sampler"])
def test_kernels_are_timed_at_each_load(part, tmp_path, monkeypatch):
    figures = figures_of(part, tmp_path, monkeypatch)
    assert len(figures) == (3 if part == "attention" else 2)


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == gpu.NO_GPU
    assert "no GPU" in capsys.readouterr().err


def test_a_computed_target_says_what_a_simulated_one_says(monkeypatch):
    monkeypatch.setenv(gpu_fleet.SHAPE, "tiny")
    monkeypatch.setenv(gpu_fleet.DEVICE, DEVICE.type)
    monkeypatch.setattr(gpu_fleet, "MOST_ROWS", 1)
    words = np.arange(3, 90)
    pace = Pace(find_profile(gpu.LIKE).target, sleep=lambda _: None)
    targets = [kind(words, pace, 97) for kind in (gpu_fleet.ComputedTarget, SimulatedTarget)]
    caches = [target.new_cache(NUM_BLOCKS) for target in targets]
    walks = gpu_parts.chains(1, 1, 5, gpu_parts.GREEDY)
    for cache in caches:
        cache.apply_moves([(5, 6)])
    found, expected = (
        target.launch(pack(chain(PROMPT[:5]), [TABLE], [4]), cache, walks).logits([0])
        for target, cache in zip(targets, caches, strict=True)
    )
    assert np.array_equal(found, expected)
    assert caches[0].computed.keys.any(), "the step was computed"
