"""The first steps of a draft engine, so that its first session finds everything compiled."""

from __future__ import annotations

from paceline.core.draft_scheduler import VerifierLeft, VerifierMessages
from paceline.core.messages import CommittedStates, OpenSession, ToDrafter
from paceline.core.params import SamplingParams
from paceline.engine.drafter import DraftEngine


def warm_up(engine: DraftEngine, feature_width: int) -> None:
    """Grows a greedy and a sampled tree of a few nodes, for a head from a feature of zeros."""
    for index, temperature in enumerate((0.0, 0.8)):
        opened = OpenSession(
            session_id=f"warm-up-{index}",
            epoch=0,
            token_ids=(0, 0),
            prompt_len=2,
            sampling=SamplingParams(max_tokens=8, temperature=temperature, top_p=0.9),
            price=0.0,
            room=8,
        )
        messages: list[ToDrafter] = [opened]
        if feature_width:
            values = bytes(2 * feature_width)
            messages.append(
                CommittedStates(session_id=opened.session_id, epoch=0, start=0, width=feature_width, values=values)
            )
        engine.handle(VerifierMessages(link=0, messages=messages))
    while engine.has_work():
        engine.step()
    engine.handle(VerifierLeft(link=0))
