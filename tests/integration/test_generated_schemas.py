"""Whatever the schema: answers that end by themselves validate, those cut off say so, and drafts change no token."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import FinishReason
from paceline.core.params import DRAFT_MODEL, GRAMMAR, NGRAM, SamplingParams, SpeculationParams
from paceline.engine.grammar import Grammars
from paceline.engine.loading import model_identity
from paceline.gateway.grammars.formats import LAYOUT
from tests.support.engines import EnginePair

pytestmark = pytest.mark.full

Schema = dict[str, Any]

NUM_AT_ONCE = 8
LONGEST = 96
NAMES = st.one_of(st.sampled_from(["id", "name", "a b", 'quo"te', "ключ"]), st.text(min_size=1, max_size=5))


def leaves() -> st.SearchStrategy[Schema]:
    bounds = st.integers(-50, 50)
    values = st.one_of(st.none(), st.booleans(), st.integers(-9, 99), st.text(max_size=6))
    return st.one_of(
        st.builds(lambda kind: {"type": kind}, st.sampled_from(["boolean", "null", "integer", "number"])),
        st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
                  bounds, st.integers(0, 99)),
        st.builds(lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
                  st.integers(0, 3), st.integers(0, 6)),
        st.builds(lambda pattern: {"type": "string", "pattern": pattern},
                  st.sampled_from(["^[a-z]{2,5}$", "^v[0-9]+(\\.[0-9]+)?$", "^(yes|no)$", "^[A-Z]-[0-9]{4}$"])),
        st.builds(lambda form: {"type": "string", "format": form}, st.sampled_from(["date", "uuid", "ipv4"])),
        st.builds(lambda some: {"enum": some}, st.lists(values, min_size=1, max_size=4)),
        st.builds(lambda value: {"const": value}, st.one_of(st.integers(), st.text(max_size=8))),
    )  # fmt: skip


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(NAMES, inner, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(list(properties)), unique=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def branches(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    arrays = st.builds(
        lambda items, low, span: {"type": "array", "items": items, "minItems": low, "maxItems": low + span},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    unions = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects(inner), arrays, unions)


SCHEMAS = objects(st.recursive(leaves(), branches, max_leaves=5))


class Bench:
    """Engines without drafts and with them."""

    def __init__(self) -> None:
        identity = model_identity(DEMO_TARGET)
        self.grammars = Grammars(DEMO_TARGET, identity.vocab_size, identity.eos_token_ids)
        self.tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
        methods = (DRAFT_MODEL, NGRAM, GRAMMAR)
        self.pair = EnginePair(
            DEMO_TARGET, DEMO_DRAFTER, policy=FixedGamma(gamma=6), methods=methods, grammars=self.grammars
        )
        self.num_finished = self.num_cut_off = self.num_accepted = 0

    def check(self, schemas: list[Schema], temperature: float) -> None:
        samplings = [
            SamplingParams(max_tokens=LONGEST, temperature=temperature, seed=number, grammar=_grammar_of(schema))
            for number, schema in enumerate(schemas)
        ]
        plain = self._run(samplings, SpeculationParams(enabled=False))
        drafted = self._run(samplings, SpeculationParams())
        assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
        for schema, session in zip(schemas, drafted, strict=True):
            assert session.error is None
            self.num_accepted += session.result.speculation.num_accepted_draft_tokens
            if session.result.finish_reason is FinishReason.STOP:
                text = self.tokenizer.decode(session.token_ids, skip_special_tokens=True)
                jsonschema_rs.Draft202012Validator(schema).validate(json.loads(text))
                self.num_finished += 1
            else:
                assert len(session.token_ids) == LONGEST
                self.num_cut_off += 1

    def _run(self, samplings: list[SamplingParams], speculation: SpeculationParams) -> list[Any]:
        names = [f"s{len(self.pair.names) + number}" for number in range(len(samplings))]
        prompt = self.tokenizer.encode("# An example as JSON:\nvalue = ").ids
        for name, sampling in zip(names, samplings, strict=True):
            self.pair.submit(name, prompt, sampling, speculation)
        self.pair.run()
        return [self.pair.sessions[name] for name in names]


def _grammar_of(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=dict(LAYOUT))


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(SCHEMAS, min_size=NUM_AT_ONCE, max_size=NUM_AT_ONCE), st.sampled_from([0.0, 1.0]))
def test_answers_to_any_schema_validate_and_drafts_leave_them_alone(
    bench: Bench, schemas: list[Schema], temperature: float
) -> None:
    bench.check(schemas, temperature)
