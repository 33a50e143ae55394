"""The next turn of a conversation finds the verifier that computed the last one, through a real gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from paceline.core.pages import BLOCK_SIZE
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, scripted_fleet


async def complete(fleet: ScriptedFleet, prompt: list[int], max_tokens: int) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "seed": 0}
    answer = await fleet.http.post("/v1/completions", json=fields)
    assert answer.status_code == 200


async def test_the_next_turn_goes_to_the_verifier_that_generated_the_answer(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, num_verifiers=2) as fleet:
        first, second = fleet.verifiers
        question = list(range(5, 9))
        first.script = Script(pause_after=0)
        busy = asyncio.create_task(complete(fleet, [1], 1))
        session_id = await first.paused.get()
        # Too short to be remembered by itself; with its answer it fills a block.
        answer = fleet.letter_ids(0, BLOCK_SIZE, question)
        await complete(fleet, question, len(answer))
        first.script = Script()
        first.resume(session_id)
        await busy
        await complete(fleet, [*question, *answer, *question[:2]], 1)
        await complete(fleet, question[2:], 1)
        assert [len(request.prompt_token_ids) for request in second.requests] == [4, 22]
        assert [len(request.prompt_token_ids) for request in first.requests] == [1, 2]
