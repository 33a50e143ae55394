"""The simulated engine as a verifier has it: its texts, and a drafter inside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.core.errors import ConfigError
from paceline.core.messages import CommittedTokens, GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Submit
from paceline.simulated.profile import write_profile
from paceline.verifier.config import VerifierConfig
from paceline.verifier.served import ServedEngine
from paceline.verifier.simulated_engine import simulated_engine
from tests.unit.planning.facts import profile

NUM_TOKENS = 60
INSIDE = {"method": "draft_model", "placement": "verifier", "model": str(DEMO_DRAFTER)}


def served(folder: Path, **speculation: Any) -> ServedEngine:
    """A verifier's engine on a device whose steps take a millisecond, a draft step a twentieth of it."""
    facts = profile()
    device = replace(facts.target, rows=(1, 512), seconds=(1e-3, 1e-3))
    drafter = replace(facts.colocated, rows=(1, 512), seconds=(5e-5, 5e-5))
    path = folder / "profile.json"
    write_profile(replace(facts, target=device, colocated=drafter), path)
    return simulated_engine(
        VerifierConfig(
            model=DEMO_TARGET,
            engine="simulated",
            profile=str(path),
            acceptance=0.9,
            speculative_config=json.dumps(speculation),
        )
    )


def text_of(served: ServedEngine, *, speculative: bool) -> tuple[list[int], int]:
    """The tokens of one session, and the accepted guesses among them."""
    engine = served.make()
    request = GenerateRequest(
        session_id="one",
        epoch=1,
        prompt_token_ids=(5, 9, 7),
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, ignore_eos=True),
        speculation=SpeculationParams(enabled=speculative),
    )
    engine.handle(Submit(request=request, serial=0, drafter_address=served.own_drafter))
    tokens: list[int] = []
    accepted = 0
    while engine.has_work():
        output = engine.step()
        accepted += sum(output.report.accepted)
        tokens += [
            token_id
            for _, outcome in output.committed
            if isinstance(outcome, CommittedTokens)
            for token_id in outcome.token_ids
        ]
    return tokens, accepted


def test_a_drafter_inside_the_verifier_guesses_and_changes_no_text(tmp_path: Path) -> None:
    inside = served(tmp_path, **INSIDE, policy="fixed", num_speculative_tokens=4)
    assert inside.own_drafter
    plain, none_accepted = text_of(served(tmp_path), speculative=False)
    drafted, accepted = text_of(inside, speculative=True)
    assert (len(plain), none_accepted) == (NUM_TOKENS, 0)
    assert drafted == plain
    assert accepted > NUM_TOKENS / 2


def test_the_drafter_inside_leaves_the_target_less_room(tmp_path: Path) -> None:
    contexts = [each.identity.context_len for each in (served(tmp_path), served(tmp_path, **INSIDE))]
    assert contexts == [profile().target.kv_tokens, profile().colocated_kv_tokens]


def test_methods_that_need_a_real_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer_skip needs a real model"):
        served(tmp_path, method="layer_skip")
