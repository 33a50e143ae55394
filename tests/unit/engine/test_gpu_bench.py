"""The GPU bench on the CPU with tiny shapes: its code runs, imposes what it says, and does not call wrong right."""

from __future__ import annotations

import json

import pytest
import torch
from loadtest import gpu

TINY = "--shape tiny --device cpu --rows 1,16 --sessions 2 --context 20 --tokens 16 --repeats 1 --gamma 3"


def run_tiny(capsys, *more):
    """Exit status and the figures of the last line."""
    with pytest.raises(SystemExit) as ended:
        gpu.main([*TINY.split(), *more])
    return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("acceptance", ["0", "1"])
def test_every_table_is_there_and_acceptance_is_what_was_imposed(acceptance, capsys):
    status, figures = run_tiny(capsys, "--acceptance", acceptance)
    assert (status, figures["ok"], figures["imposed_acceptance"]) == (0, True, float(acceptance))
    steps = [(row["rows"], row["sessions"]) for row in figures["target_steps"]]
    assert steps == [(1, 1), (16, 16), (16, 2)]
    assert len(figures["draft_steps"]) == 3
    assert [row["acceptance_rate"] for row in figures["rounds"]] == [float(acceptance)]


def test_graphs_whose_logits_differ_from_eager_steps_end_with_status_1(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "_distance", lambda *_: 0.2)
    status, figures = run_tiny(capsys)
    assert (status, figures["ok"]) == (1, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing only where it is")
def test_without_cuda_it_says_what_it_needs_and_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err
