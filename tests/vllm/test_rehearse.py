"""`paceline rehearse` shows a real vLLM's helper both modes, and says what it found."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from paceline.client import rehearse
from paceline.vllm.settings import JOB_VARIABLE, HelperJob
from tests.support.fuzzing import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STREAMS = 4


def helper_of(pid: int) -> Path:
    """The socket at which a helper process is told the mode."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (job,) = [each for each in map(os.fsdecode, environ) if each.startswith(JOB_VARIABLE)]
    return HelperJob.from_json(job.partition("=")[2]).mode_socket


async def test_a_rehearsal_shows_both_modes_at_each_load(tiered, capsys) -> None:
    await until(tiered.helpers)
    path = helper_of(*tiered.helpers())
    # It is ready some seconds after vLLM.
    await until(path.exists)
    flags = [tiered.url, "--streams", str(STREAMS), "--helper", str(path)]
    await asyncio.to_thread(rehearse.main, flags)
    _, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(line[0]) for line in lines] == [1, 2, 4]
    # Alone, a text with the drafter on a core of its own gains.
    assert lines[0][3] == "drafts"
    async with rehearse.listening([path]) as (helper,):
        assert {0, 1, 2} <= helper.rates.keys()
        assert all(min(helper.rates[load]) > 0.0 for load in range(3))
