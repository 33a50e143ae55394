"""The draft engine on a real (tiny) model: what it lags behind, levels in one call, and states of a head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.core.messages import Commit, Commits, CommittedStates, OpenSession
from paceline.core.params import SamplingParams
from paceline.engine.draft_scheduler import DraftLimits, VerifierMessages
from paceline.engine.drafter import DraftEngine
from paceline.engine.eagle3 import draft_identity, load_draft
from paceline.engine.loop import run_sync
from tests.support.clock import Clock
from tests.support.eagle import save_eagle3
from tests.support.guesses import by_session, to_commits


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


# By the numbers of their sessions.
NAMES = ("", "long", "short", "strange", "plain")


def opened(name: str, length: int, room: int = 6, **sampling) -> OpenSession:
    return OpenSession(
        session_id=name,
        epoch=1,
        number=NAMES.index(name),
        token_ids=tuple(index % 200 for index in range(length)),
        prompt_len=length,
        sampling=SamplingParams(max_tokens=64, temperature=0.0, **sampling),
        price=0.0,
        room=room,
    )


def commit(name: str, base_len: int, token_id: int = 7) -> Commits:
    return to_commits(Commit(NAMES.index(name), base_len, [token_id], price=0.0, room=6))


def said(*messages) -> VerifierMessages:
    return VerifierMessages(link=1, messages=messages)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_levels_in_one_call_are_what_a_step_for_each_gives(tiny_pair, tmp_path, clock, method, sampling):
    """Two sessions, a short and a long one, a commit that misses, and levels that end at different depths."""
    head = method == "eagle3"
    folder = save_eagle3(tmp_path / "head", tiny_pair[0], layer_ids=(0, 0, 0)) if head else tiny_pair[1]
    checkpoint = {"folder": folder, "target": tiny_pair[0], "dtype": "float32", "device": "cpu"}
    drafted = []
    for max_levels in (1, 16):
        engine = DraftEngine(
            decoder=load_draft(**checkpoint, num_threads=1),
            identity=draft_identity(**checkpoint),
            num_blocks=64,
            limits=DraftLimits(width=1, max_levels=max_levels),
            clock=clock,
        )
        sessions = [replace(opened(name, length, room), **sampled(sampling)) for name, length, room in SHORT_AND_LONG]
        engine.handle(said(*sessions, *(states(each, 0, len(each.token_ids)) for each in sessions if head)))
        nodes, most = collected(engine)
        engine.handle(said(*(states(each, len(each.token_ids), 1) for each in sessions if head), *missed()))
        more, _ = collected(engine)
        assert most == max_levels == 1 or most > 4
        drafted.append((nodes, more))
    by_level, at_once = drafted
    assert [len(each) for each in by_level] == [2, 2]
    for slow, fast in zip(by_level, at_once, strict=True):
        for name, chain in slow.items():
            assert [token for token, _ in fast[name]] == [token for token, _ in chain]
            assert np.allclose([sure for _, sure in fast[name]], [sure for _, sure in chain], atol=0.01)


SHORT_AND_LONG = (("short", 7, 4), ("long", 40, 12))


def sampled(changes):
    return {"sampling": SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **changes})}


def states(session: OpenSession, start: int, count: int) -> CommittedStates:
    values = np.random.default_rng(start).normal(size=(count, 64)).astype(np.float32)
    encoded = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return CommittedStates(number=session.number, start=start, width=64, values=encoded)


def missed() -> list[Commits]:
    return [
        to_commits(Commit(NAMES.index(name), length, [199], price=0.0, room=8)) for name, length, _ in SHORT_AND_LONG
    ]


def collected(engine: DraftEngine) -> tuple[dict[str, list[tuple[int, float]]], int]:
    """What an engine drafts until it comes to rest, by session, and the most levels of a step."""
    nodes: dict[str, list[tuple[int, float]]] = {}
    most = 0
    while engine.has_work():
        output = run_sync(engine.step())
        most = max(most, output.report.num_levels)
        for message in output.to_verifiers.get(1, []):
            for each in by_session(message):
                nodes.setdefault(NAMES[each.number], []).extend((node.token_id, node.confidence) for node in each.nodes)
    return nodes, most
