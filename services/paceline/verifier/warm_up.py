"""First sessions of an engine, so that the first request of a user finds everything compiled."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Submit
from paceline.verifier.verifier_host import TargetStepper

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(
    max_tokens=8, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, frequency_penalty=0.1, ignore_eos=True
)


def warm_up(engine: TargetStepper, samplings: Sequence[SamplingParams], speculation: SpeculationParams) -> None:
    """Runs a session of a few tokens with each of these parameters."""
    for index, sampling in enumerate(samplings):
        request = GenerateRequest(
            session_id=f"warm-up-{index}",
            epoch=0,
            prompt_token_ids=(0,),
            sampling=sampling,
            speculation=speculation,
        )
        engine.handle(Submit(request=request, serial=index))
    while engine.has_work():
        engine.step()
