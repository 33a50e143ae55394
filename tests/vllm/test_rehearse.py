"""`paceline rehearse` shows a real vLLM's helper both modes, and says what it found."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.client import rehearse
from paceline.vllm.places import mode_sockets
from tests.support.fuzzing import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STREAMS = 4


def helper_of(pid: int) -> Path | None:
    """The socket at which a helper process is told the mode; None: it is not ready yet."""
    own = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        # Some are closed by now.
        with suppress(FileNotFoundError):
            own.add(os.readlink(each))
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {f"socket:[{row[6]}]": Path(row[7]) for row in table if len(row) > 7}
    return next((path for path in mode_sockets() if path in {named.get(each) for each in own}), None)


async def test_a_rehearsal_shows_both_modes_at_each_load(tiered, capsys) -> None:
    await until(tiered.helpers)
    await until(lambda: helper_of(*tiered.helpers()))
    path = helper_of(*tiered.helpers())
    flags = [tiered.url, "--streams", str(STREAMS), "--helper", str(path)]
    await asyncio.to_thread(rehearse.main, flags)
    _, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(line[0]) for line in lines] == [1, 2, 4]
    # Alone, a text with the drafter on a core of its own gains.
    assert lines[0][3] == "drafts"
    async with rehearse.listening([path]) as (helper,):
        assert {0, 1, 2} <= helper.rates.keys()
        assert all(min(helper.rates[load]) > 0.0 for load in range(3))
