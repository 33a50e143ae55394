"""Steps that are launched before the tokens of those before are read: texts are the same, and ended ones drop out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import PositionLogprobs
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.decoder import Decoder
from paceline.engine.loading import load_decoder
from paceline.engine.pending import HostPending
from tests.support.engines import EnginePair, Generated, prompts

ALONE = SpeculationParams(enabled=False)


class AheadPending(HostPending):
    """Knows its tokens before anybody asks."""

    runs_ahead = True

    def __init__(self, logits, wanted):
        super().__init__(logits)
        tokens = self.follow(wanted).tokens[wanted.rows]
        self.tokens = np.where(tokens == step_kernels.NOTHING, 0, tokens)


class AheadDecoder(Decoder):
    """A CPU that does as if it worked by itself.

    Attributes:
        num_ahead: Steps that were launched before the one above was read.
        is_full: Whether there is room for one step at a time.
    """

    num_ahead, is_full = 0, False

    def launch(self, batch, cache, wanted):
        if batch.above is not None:
            if self.is_full:
                raise MemoryError("no room")
            self.num_ahead += 1
            batch = replace(batch, token_ids=batch.above.tokens[batch.token_ids], above=None)
        return AheadPending(self.forward(batch, cache).numpy().copy(), wanted)


def ahead_of(folder: Path) -> AheadDecoder:
    return AheadDecoder(load_decoder(folder, "float32", "cpu", 1).backend)


def sampling(number: int, **changes: Any) -> SamplingParams:
    """Each session chooses in its own way, and has a length of its own."""
    ways = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.1, "top_p": 0.9}, {"top_k": 20})
    fields = {"max_tokens": 5 + 7 * (number % 5), "seed": number, "ignore_eos": True, **ways[number % len(ways)]}
    return SamplingParams(**(fields | changes))


def traffic(pair: EnginePair) -> None:
    """Sessions that come while others run, stop early, are cancelled, and find too few pages; some have a drafter."""
    for number, prompt in enumerate(prompts(14)):
        changes = {3: {"presence_penalty": 0.5}, 5: {"logprobs": 2}}.get(number, {})
        speculation = None if number in (8, 9) else ALONE
        stops = (stop_of(pair, number),) if number % 4 == 2 else ()
        pair.submit(str(number), prompt, sampling(number, stop_token_ids=stops, **changes), speculation)
        for _ in range(number % 3 * 4):
            pair.round()
        if number == 7:
            pair.cancel("6")
    pair.run()
    assert pair.target.pool.num_used == 0


def stop_of(pair: EnginePair, number: int) -> int:
    """The third token that a session of another number had: a token that this one is likely to come to."""
    others = [each.token_ids for each in pair.sessions.values() if len(each.token_ids) > 2]
    return others[number % len(others)][2] if others else 0


def logprobs_of(session: Generated) -> list[PositionLogprobs]:
    return [each for message in session.messages for each in message.logprobs]


def generated(tiny_pair: tuple[Path, Path], decoder: Decoder, run: Callable[[EnginePair], None]) -> EnginePair:
    pair = EnginePair(*tiny_pair, decoder=decoder, policy=FixedGamma(gamma=3), num_blocks=16, max_num_seqs=5)
    run(pair)
    return pair


def test_texts_are_the_same_whether_steps_run_ahead_or_not(tiny_pair):
    decoder = ahead_of(tiny_pair[0])
    ahead, plain = (
        generated(tiny_pair, each, traffic) for each in (decoder, load_decoder(tiny_pair[0], "float32", "cpu", 1))
    )
    assert decoder.num_ahead > 20
    assert ahead.num_preempted
    for name, found in ahead.sessions.items():
        expected = plain.sessions[name]
        if name == "6":
            shorter, longer = sorted((found.token_ids, expected.token_ids), key=len)
            assert longer[: len(shorter)] == shorter
            continue
        assert found.token_ids == expected.token_ids
        assert found.result.finish_reason == expected.result.finish_reason
        assert logprobs_of(found) == logprobs_of(expected)


@pytest.mark.parametrize(
    ("changes", "speculation"),
    [
        ({"presence_penalty": 0.5}, ALONE),
        ({"logprobs": 1}, ALONE),
        ({}, SpeculationParams()),
    ],
    ids=["penalty", "log probabilities", "a drafter"],
)
def test_a_session_that_needs_the_hosts_word_keeps_steps_from_running_ahead(changes, speculation, tiny_pair):
    decoder = ahead_of(tiny_pair[0])

    def run(pair):
        pair.submit("plain", prompts(1)[0], sampling(0, max_tokens=30), ALONE)
        for _ in range(5):
            pair.round()
        assert decoder.num_ahead
        pair.submit("other", prompts(2)[1], sampling(1, max_tokens=8, **changes), speculation)
        pair.round()
        pair.round()
        before = decoder.num_ahead
        while not pair.sessions["other"].result:
            pair.round()
        assert decoder.num_ahead == before
        pair.run()
        assert decoder.num_ahead > before

    generated(tiny_pair, decoder, run)


def test_who_arrives_is_read_in_the_step_after_the_one_that_was_launched(tiny_pair):
    def run(pair):
        pair.submit("first", prompts(1)[0], sampling(0, max_tokens=40), ALONE)
        for _ in range(5):
            pair.round()
        pair.submit("second", prompts(2)[1], sampling(1, max_tokens=4), ALONE)
        pair.round()
        assert not pair.sessions["second"].token_ids
        pair.round()
        assert len(pair.sessions["second"].token_ids) == 1
        pair.run()

    generated(tiny_pair, ahead_of(tiny_pair[0]), run)


def test_a_step_whose_sessions_have_all_left_is_dropped(tiny_pair):
    decoder = ahead_of(tiny_pair[0])

    def run(pair):
        pair.submit("first", prompts(1)[0], sampling(0, max_tokens=40), ALONE)
        for _ in range(5):
            pair.round()
        pair.cancel("first")
        num_rows = [report.num_rows for report in pair.reports]
        pair.run()
        assert [report.num_rows for report in pair.reports][len(num_rows) :] in ([], [0])
        pair.submit("second", prompts(2)[1], sampling(1, max_tokens=4), ALONE)
        pair.run()
        assert len(pair.sessions["second"].token_ids) == 4

    generated(tiny_pair, decoder, run)


def test_where_there_is_no_room_for_two_steps_one_runs_after_the_other(tiny_pair):
    decoder = ahead_of(tiny_pair[0])
    decoder.is_full = True

    def run(pair):
        pair.submit("s", prompts(1)[0], sampling(0, max_tokens=10), ALONE)
        pair.run()
        assert len(pair.sessions["s"].token_ids) == 10

    generated(tiny_pair, decoder, run)
    assert not decoder.num_ahead


def test_drafters_at_rest_are_called_although_steps_run_ahead(tiny_pair):
    """Of a policy that has drafters rest, and calls them after a while."""

    class Resting(FixedGamma):
        at_rest = True

        @property
        def drafts(self):
            return not self.at_rest

    policy, decoder = Resting(gamma=3), ahead_of(tiny_pair[0])
    pair = EnginePair(*tiny_pair, decoder=decoder, policy=policy)
    pair.submit("s", prompts(1)[0], sampling(0, max_tokens=60))
    for _ in range(10):
        pair.round()
    assert decoder.num_ahead > 5
    policy.at_rest = False
    for _ in range(6):
        pair.round()
    assert pair.reports[-1].gammas == [3]
