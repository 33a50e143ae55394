"""The parts of `make gpu-contact`, at sizes that an interpreter can do: they run, and their figures make a profile."""

from __future__ import annotations

import json

import pytest
from loadtest import gpu, gpu_parts

from paceline.simulated.profile import read_profile, write_profile
from tests.unit.engine.cuda.interpreted import DEVICE, INTERPRETED

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
    assert len(gpu.sentences([figure])) == 1


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
