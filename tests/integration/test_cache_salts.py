"""Who may find whose pages: sessions of one salt each other's, and nobody those that cannot be used."""

from __future__ import annotations

import pytest

from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import OpenSession
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.processors import UnusableLogitsError
from paceline.engine.decoder import Decoder
from paceline.engine.loading import load_decoder
from paceline.engine.loop import run_sync
from tests.support.engines import EnginePair

PROMPT = [index % 200 for index in range(50)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PLAIN = SpeculationParams(enabled=False)
# Its embedding is not a number, and so is all that attends to it.
BROKEN = 230


def test_the_same_prompt_under_another_salt_finds_nothing_and_gets_the_same_tokens(tiny_pair) -> None:
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4))
    for name, salt in (("first", "a"), ("other", "b"), ("none", ""), ("again", "a")):
        pair.submit(name, PROMPT, GREEDY, salt=salt)
        pair.run()
    cached = {name: each.result.num_cached_tokens for name, each in pair.sessions.items()}
    assert cached == {"first": 0, "other": 0, "none": 0, "again": 48}
    assert len({tuple(each.token_ids) for each in pair.sessions.values()}) == 1


def test_a_drafter_is_told_the_salt_and_shares_its_pages_under_it_alone(tiny_pair) -> None:
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4))
    hits = []
    for name, salt in (("first", "a"), ("other", "b"), ("again", "a")):
        pair.draft.pool.take_counts()
        pair.submit(name, PROMPT, GREEDY, salt=salt)
        found = 0
        while pair.target.has_work():
            pair._target_step()
            while pair.draft.has_work():
                found += run_sync(pair.draft.step()).report.counts["vllm:prefix_cache_hits",]
        hits.append(found)
    salts = [message.cache_salt for message in pair.to_drafter if isinstance(message, OpenSession)]
    assert salts == ["a", "b", "a"]
    assert hits[:2] == [0, 0]
    assert hits[2] > 0


@pytest.fixture
def broken_decoder(tiny_pair) -> Decoder:
    """A target, one of whose embeddings is not a number until `mend` is called."""
    return load_decoder(tiny_pair[0], "float32", "cpu", 1)


class Breaking:
    """Has the KV of the rows of a token come out as NaN, for as long as `broken`.

    Args:
        decoder: The target.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.broken = True
        launch = decoder.launch

        def breaking(batch, cache, wanted):
            pending = launch(batch, cache, wanted)
            bad = batch.slots[batch.token_ids == BROKEN] if self.broken else ()
            for slot in bad:
                block, offset = divmod(int(slot), cache.values.shape[3])
                cache.values[:, block, :, offset] = float("nan")
            return pending

        decoder.launch = breaking  # type: ignore[method-assign]


def test_pages_that_gave_nothing_to_choose_from_are_never_found_again(tiny_pair, broken_decoder) -> None:
    breaking = Breaking(broken_decoder)
    prompt = [*PROMPT[:20], BROKEN, *PROMPT[20:]]
    pair = EnginePair(*tiny_pair, decoder=broken_decoder, max_num_batched_tokens=32)
    pair.submit("bad", prompt, GREEDY, PLAIN)
    pair.run()
    assert isinstance(pair.sessions["bad"].error, UnusableLogitsError)
    breaking.broken = False
    pair.submit("good", prompt, GREEDY, PLAIN)
    pair.run()
    assert pair.sessions["good"].result.num_cached_tokens == 0
    assert len(pair.sessions["good"].token_ids) == 8


def test_what_others_go_on_to_compute_from_such_pages_is_not_found_either(tiny_pair, broken_decoder) -> None:
    breaking = Breaking(broken_decoder)
    begin = [*PROMPT[:31], BROKEN]
    pair = EnginePair(*tiny_pair, decoder=broken_decoder, max_num_batched_tokens=32)
    # Its pages become findable before anybody sees what is in them.
    pair.submit("bad", [*begin, 1, 2, 3], GREEDY, PLAIN)
    pair.round()
    pair.submit("shares", [*begin, *PROMPT, *PROMPT], GREEDY, PLAIN)
    while pair.sessions["bad"].error is None:
        pair.round()
    assert pair.sessions["shares"].error is None, "it still reads its prompt"
    pair.round()
    pair.cancel("shares")
    breaking.broken = False
    for name in ("again", "once more"):
        pair.submit(name, [*begin, *PROMPT, *PROMPT], GREEDY, PLAIN)
        pair.run()
        assert pair.sessions[name].error is None
    assert pair.sessions["again"].result.num_cached_tokens == 0
    assert pair.sessions["once more"].result.num_cached_tokens == 128
