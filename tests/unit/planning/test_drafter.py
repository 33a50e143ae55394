"""A simulated drafter's room, and what the KV of its sessions costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.messages import OpenSession
from paceline.core.params import SamplingParams
from paceline.planning.drafter import SimulatedDrafter
from paceline.planning.events import Events
from paceline.simulated.guesses import RIGHT
from paceline.simulated.profile import DrafterFacts
from tests.unit.planning.facts import SureGuesses, profile


def facts(**device: float) -> DrafterFacts:
    return replace(profile().drafter, **device)


def opened(number: int, prompt_len: int) -> OpenSession:
    return OpenSession(
        session_id=str(number),
        epoch=1,
        token_ids=(RIGHT,) * prompt_len,
        prompt_len=prompt_len,
        sampling=SamplingParams(max_tokens=50),
        price=0.1,
        room=8,
    )


def test_sessions_that_find_no_room_for_their_prompt_go_without_drafts() -> None:
    drafter = SimulatedDrafter(facts(kv_tokens=100), SureGuesses(right=True), Events(0))
    drafter.handle([opened(number, prompt_len) for number, prompt_len in enumerate((60, 60, 30))], 0.0)
    plan = drafter.scheduler.plan(0.0)
    assert [part.session.session_id for part in plan.catching_up] == ["2", "0"], "the shortest is read first"


def test_a_draft_step_reads_the_kv_of_its_sessions() -> None:
    def first_step_s(kv_token_s: float) -> float:
        drafter = SimulatedDrafter(facts(kv_token_s=kv_token_s), SureGuesses(right=True), Events(0))
        drafter.handle([opened(number, prompt_len) for number, prompt_len in enumerate((30, 70))], 0.0)
        return drafter.seconds(drafter.scheduler.plan(0.0))

    assert first_step_s(1e-5) - first_step_s(0.0) == pytest.approx(100e-5)
