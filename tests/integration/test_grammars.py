"""Grammars in the engine: what is generated follows them, and no draft, batch or failover changes a token."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import FinishReason
from paceline.core.params import GRAMMAR, NGRAM, SamplingParams, SpeculationParams
from paceline.engine.grammar import Grammars
from paceline.engine.loading import model_identity
from paceline.gateway.grammars.formats import LAYOUT
from tests.support.engines import EnginePair

OFF = SpeculationParams(enabled=False)
IDENTITY = model_identity(DEMO_TARGET)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "method", "class"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 999},
        "is_public": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "kind", "line", "is_public", "tags"],
    "additionalProperties": False,
}


def grammar_of(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=dict(LAYOUT))


GREEDY = SamplingParams(max_tokens=120, temperature=0.0, grammar=grammar_of(SCHEMA))
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.0, seed=11),
    "everything": replace(
        GREEDY, temperature=0.8, top_p=0.95, top_k=50, seed=5, repetition_penalty=1.1, frequency_penalty=0.2,
        logit_bias=((3, 1.5), (9, -4.0)), min_tokens=20, logprobs=2, bad_words=((300,), (40, 41)),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars():
    return Grammars(DEMO_TARGET, IDENTITY.vocab_size, IDENTITY.eos_token_ids)


@pytest.fixture(scope="module")
def run(tokenizer, grammars):
    """Runs prompts at once, on one pair of engines a set of settings."""
    pairs: dict[Any, EnginePair] = {}

    def run(sampling, speculation=OFF, count=4, committed=(), **settings) -> list[Any]:
        key = tuple(sorted((name, str(value)) for name, value in settings.items()))
        if key not in pairs:
            pairs[key] = EnginePair(DEMO_TARGET, DEMO_DRAFTER, grammars=grammars, **settings)
        pair, names = pairs[key], []
        for index in range(count):
            names.append(f"s{len(pair.names)}")
            prompt = tokenizer.encode(f"# Describe number {index}:\nentry = ").ids
            pair.submit(names[-1], prompt, sampling, speculation, committed=committed)
        pair.run()
        return [pair.sessions[name] for name in names]

    return run


def ids(sessions) -> list[list[int]]:
    return [session.token_ids for session in sessions]


@pytest.fixture(scope="module")
def plain(run):
    return {name: ids(run(sampling)) for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_answer_that_ends_by_itself_follows_the_schema(run, tokenizer, name):
    sessions = run(SAMPLINGS[name])
    for session in sessions:
        text = tokenizer.decode(session.token_ids)
        if session.result.finish_reason is FinishReason.STOP:
            jsonschema_rs.Draft202012Validator(SCHEMA).validate(json.loads(text))
        else:
            assert len(session.token_ids) == 120
    assert any(session.result.finish_reason is FinishReason.STOP for session in sessions)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("methods", [("draft_model",), (GRAMMAR,), ("draft_model", NGRAM, GRAMMAR)], ids="+".join)
def test_drafts_leave_the_tokens_alone(run, plain, name, methods):
    speculation = SpeculationParams(method="+".join(methods))
    sessions = run(SAMPLINGS[name], speculation, policy=FixedGamma(gamma=8), width=3, methods=methods)
    assert ids(sessions) == plain[name]
    assert sum(session.result.speculation.num_accepted_draft_tokens for session in sessions) > 20


def test_a_session_goes_on_from_its_committed_tokens_with_the_same_text(run, plain):
    for cut in (1, 7, 20):
        whole = plain["sampled"][0]
        rest = run(SAMPLINGS["sampled"], count=1, committed=whole[:cut])
        assert whole[:cut] + ids(rest)[0] == whole


def test_where_the_grammar_has_ended_nothing_but_the_end_follows_whatever_min_tokens_says(run, tokenizer):
    lark = LLMatcher.grammar_from_regex("abc")
    (session,) = run(replace(GREEDY, grammar=lark, min_tokens=100), count=1)
    assert session.result.finish_reason is FinishReason.STOP
    assert tokenizer.decode(session.token_ids) == "abc"


def test_a_text_whose_end_is_ignored_is_filled_with_end_tokens(run, tokenizer):
    lark = LLMatcher.grammar_from_regex("abc")
    (session,) = run(replace(GREEDY, grammar=lark, ignore_eos=True, max_tokens=12), count=1)
    assert session.result.finish_reason is FinishReason.LENGTH
    assert tokenizer.decode(session.token_ids, skip_special_tokens=True) == "abc"


def test_a_stop_token_is_chosen_only_where_the_grammar_may_end(run, tokenizer):
    (stop,) = tokenizer.encode("a", add_special_tokens=False).ids
    grammar = LLMatcher.grammar_from_regex("[ab]{2,6}!")
    for seed in range(3):
        sampling = replace(GREEDY, temperature=1.0, seed=seed, grammar=grammar, stop_token_ids=(stop,))
        for session in run(sampling):
            assert session.result.finish_reason is FinishReason.STOP
            text = tokenizer.decode(session.token_ids[:-1])
            assert re.fullmatch("[ab]{2,6}!", text), text
            assert stop not in session.token_ids[:-1]


def test_a_stop_token_that_the_grammar_cannot_do_without_is_refused_by_the_name_of_the_grammar(run, tokenizer):
    (stop,) = tokenizer.encode("!", add_special_tokens=False).ids
    sampling = replace(GREEDY, grammar=LLMatcher.grammar_from_regex("7!7"), stop_token_ids=(stop,))
    (session,) = run(sampling, count=1)
    assert "grammar: leaves no token to choose" in str(session.error)
