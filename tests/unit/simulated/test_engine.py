"""The simulated engine as a verifier has it: its texts, and a drafter inside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.messages import GenerateRequest
from paceline.core.pages import BLOCK_SIZE, longest_session
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Submit
from paceline.drafter.__main__ import _engine
from paceline.drafter.config import DrafterConfig
from paceline.engine.loop import run_sync
from paceline.simulated.profile import write_profile
from paceline.verifier.config import VerifierConfig
from paceline.verifier.served import ServedEngine, TargetStepper
from paceline.verifier.simulated_engine import SimulatedEngine, simulated_engine
from tests.unit.planning.facts import profile

NUM_TOKENS = 60
INSIDE = {"method": "draft_model", "placement": "verifier", "model": str(DEMO_DRAFTER)}


def served(
    folder: Path, flags: Mapping[str, Any] | None = None, *, kv_tokens: int = 32_768, **speculation: Any
) -> ServedEngine:
    """A verifier's engine on a device whose steps take a millisecond, a draft step a twentieth of it."""
    facts = profile(kv_tokens=kv_tokens)
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
            **(flags or {}),
        )
    )


def request(num_prompt_tokens: int, *, max_tokens: int, speculative: bool = False) -> GenerateRequest:
    """A session with a prompt of so many tokens."""
    return GenerateRequest(
        session_id="one",
        epoch=1,
        prompt_token_ids=(5,) * num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.7, ignore_eos=True),
        speculation=SpeculationParams(enabled=speculative),
    )


def serials_that_end(engine: TargetStepper) -> Iterator[int]:
    """Runs an engine until nothing is left to do, or nothing happens any more."""
    for _ in range(10_000):
        if not engine.has_work():
            return
        events = run_sync(engine.step()).commit.events
        yield from (number for number, event in events.items() if event.result is not None)


def text_of(served: ServedEngine, *, speculative: bool) -> tuple[list[int], int]:
    """The tokens of one session, and the accepted guesses among them."""
    engine = served.make()
    asked = request(3, max_tokens=NUM_TOKENS, speculative=speculative)
    engine.handle(Submit(request=asked, number=0, drafter_address=served.own_drafter))
    tokens: list[int] = []
    accepted = 0
    while engine.has_work():
        output = run_sync(engine.step())
        accepted += sum(output.report.accepted)
        tokens += output.commit.tokens
    return tokens, accepted


def test_a_drafter_inside_the_verifier_guesses_and_changes_no_text(tmp_path: Path) -> None:
    inside = served(tmp_path, **INSIDE, policy="fixed", num_speculative_tokens=4)
    assert inside.own_drafter
    plain, none_accepted = text_of(served(tmp_path), speculative=False)
    drafted, accepted = text_of(inside, speculative=True)
    assert (len(plain), none_accepted) == (NUM_TOKENS, 0)
    assert drafted == plain
    assert accepted > NUM_TOKENS / 2


def test_a_first_session_finds_no_rates_of_the_warm_up(tmp_path: Path) -> None:
    engine = served(tmp_path).make()
    assert isinstance(engine, SimulatedEngine)
    assert engine.learned()["policy"]["mode_rates"] == []


def test_the_drafter_inside_leaves_the_target_less_room(tmp_path: Path) -> None:
    contexts = [each.identity.context_len for each in (served(tmp_path), served(tmp_path, **INSIDE))]
    facts = (profile().target.kv_tokens, profile().colocated_kv_tokens)
    assert contexts == [longest_session(each // BLOCK_SIZE) for each in facts]


@pytest.mark.parametrize(
    ("flags", "context_len"),
    [
        ({"num_kv_blocks": 8}, 7 * BLOCK_SIZE),
        ({"max_model_len": 100}, 100),
        ({"num_kv_blocks": 8, "max_model_len": 100}, 100),
    ],
)
def test_the_context_that_is_announced_is_the_one_that_is_served(
    tmp_path: Path, flags: dict[str, int], context_len: int
) -> None:
    """What fits exactly runs to its end beside one like it; one token more is refused, and names the limit."""
    small = served(tmp_path, flags)
    assert small.identity.context_len == context_len
    engine = small.make()
    for number in range(2):
        longest = request(context_len - 2, max_tokens=2)
        small.check(longest)
        engine.handle(Submit(request=replace(longest, session_id=str(number)), number=number))
    assert sorted(serials_that_end(engine)) == [0, 1]
    with pytest.raises(InvalidRequestError, match=f"exceed the context of {context_len}"):
        small.check(request(context_len - 1, max_tokens=2))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"num_kv_blocks": 8, "max_model_len": 113}, r"--max-model-len 113 is more .* the 112 tokens of 8 pages"),
        ({"max_model_len": 40_000}, r"--max-model-len 40000 is more .* the 32752 tokens of 2048 pages"),
        ({"num_kv_blocks": 4000}, r"--num-kv-blocks must be from 8 to the 2048 pages that .* fill, got 4000"),
        ({"max_num_seqs": 8}, r"--max-num-seqs .* max_sessions of the profile's target"),
        ({"max_num_batched_tokens": 64}, r"--max-num-batched-tokens .* max_rows of the profile's target"),
    ],
)
def test_what_the_device_does_not_have_cannot_be_asked_of_it(
    tmp_path: Path, flags: dict[str, int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        served(tmp_path, flags)


def test_a_simulated_drafter_announces_the_sessions_of_its_profile_and_refuses_what_that_decides(
    tmp_path: Path,
) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    config = DrafterConfig(model=DEMO_DRAFTER, engine="simulated", profile=str(path))
    _, max_sessions, _ = _engine(config)
    assert max_sessions == profile().drafter.max_sessions
    for flag in ("max_num_seqs", "max_num_batched_tokens", "draft_width", "draft_rows", "draft_rows_per_session"):
        with pytest.raises(ConfigError, match=flag.replace("_", "-")):
            _engine(replace(config, **{flag: 15}))


def test_methods_that_need_a_real_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer_skip needs a real model"):
        served(tmp_path, method="layer_skip")
