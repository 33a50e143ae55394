"""`--speculative-config`: what it may ask for, and sources made of it, or refused by name."""

from __future__ import annotations

import json

import pytest

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.drafting_mode import LEAST_STEPS, Mode
from paceline.core.errors import ConfigError
from paceline.core.params import COUPLED, LAYER_SKIP, MEDUSA, REJECTION
from paceline.engine.loading import load_decoder
from paceline.verifier.config import Speculation, speculation_from
from paceline.verifier.own_engine import make_sources
from tests.support.checkpoints import save_pair
from tests.support.heads import random_medusa, save_medusa
from tests.unit.engine.tiny_models import SIZES, save_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


def asked(**settings) -> Speculation:
    return speculation_from(json.dumps(settings))


def test_nothing_asked_for_is_the_drafter_tier_and_look_up():
    speculation = asked()
    assert speculation.methods == ("draft_model", "ngram", "grammar")
    assert isinstance(speculation.draft_policy(shares_cores=False), Goodput)
    assert speculation.first_layers == ()
    assert (speculation.acceptance, asked(acceptance=REJECTION).acceptance) == (COUPLED, REJECTION)


def test_everything_may_be_asked_for():
    speculation = asked(method="ngram+medusa+layer_skip", medusa_model="/heads", exit_layer=3, policy="fixed")
    assert speculation.methods == ("ngram", MEDUSA, LAYER_SKIP)
    assert str(speculation.medusa_model) == "/heads"
    assert speculation.first_layers == (0, 1, 2)
    assert isinstance(speculation.draft_policy(shares_cores=False), FixedGamma)
    assert asked(layers=[0, 2, 5]).first_layers == (0, 2, 5)
    assert str(asked(method="eagle3+ngram", eagle3_model="/head").eagle3_model) == "/head"


def test_a_draft_model_or_a_head_may_run_inside():
    assert asked(model="/draft").own_draft is None
    assert str(asked(model="/draft", placement="verifier").own_draft) == "/draft"
    inside = asked(method="eagle3", eagle3_model="/head", model="/draft", placement="verifier")
    assert str(inside.own_draft) == "/head"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "medusa"}, "medusa_model must name a checkpoint folder, got None"),
        ({"method": "medusa", "medusa_model": 3}, "medusa_model must be a path, got '3'"),
        ({"method": "heads"}, "method must be one of draft_model, eagle3, ngram, grammar, medusa, layer_skip"),
        ({"exit_layer": 0}, "exit_layer must be a whole number from 1 to 1024, got '0'"),
        ({"exit_layer": True}, "exit_layer must be a whole number from 1 to 1024, got 'True'"),
        ({"exit_layer": 1, "layers": [0]}, "exit_layer and layers exclude one another"),
        ({"layers": []}, "layers must be a list of at least one index, ascending"),
        ({"layers": [1, 0]}, "layers must be a list of at least one index, ascending"),
        ({"layers": [-1]}, "layers must be a whole number from 0 to 1023, got '-1'"),
        ({"layers": "0"}, "layers must be a list, got '0'"),
        ({"heads": 1}, "heads is no setting; there are method, model"),
        ({"method": "eagle3"}, "eagle3_model must name a checkpoint folder, got None"),
        ({"placement": "gateway"}, "placement must be one of tier, verifier, got 'gateway'"),
        ({"placement": "verifier"}, "model must name a checkpoint folder, got None"),
        ({"placement": "verifier", "method": "ngram"}, "placement verifier needs the method draft_model or eagle3"),
        ({"acceptance": "lucky"}, "acceptance must be one of coupled, rejection, got 'lucky'"),
        ({"acceptance": "rejection", "method": "ngram"}, "acceptance rejection needs the method draft_model or eagle3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=f"--speculative-config: {message}"):
        asked(**settings)


def test_sources_are_made_in_the_order_of_what_they_cost(target, tmp_path):
    heads = save_medusa(tmp_path, random_medusa(), num_heads=3, num_blocks=1)
    speculation = asked(method="layer_skip+medusa+ngram", medusa_model=str(heads))
    decoder = load_decoder(target, "float32", "cpu")
    sources = make_sources(speculation, decoder)
    assert [source.name for source in sources] == ["ngram", "medusa", "layer_skip"]
    assert decoder.new_cache(1).states.shape[1] == decoder.hidden_size


def test_a_layer_beyond_the_target_is_refused(target):
    decoder = load_decoder(target, "float32", "cpu")
    with pytest.raises(ConfigError, match="layer 2 is beyond the target's 2 layers, 0 to 1"):
        make_sources(asked(method="layer_skip", exit_layer=3), decoder)


def test_models_served_by_transformers_modules_cannot_skip_layers(tmp_path):
    decoder = save_tiny(tmp_path, "phi", SIZES).load()
    with pytest.raises(ConfigError, match="PhiForCausalLM is served through transformers' own modules"):
        make_sources(asked(method="layer_skip"), decoder)


def test_drafting_is_tried_at_any_load_unless_drafters_lend_their_cores() -> None:
    def mode_after_seconds(*, shares_cores: bool) -> Mode:
        policy = Speculation().draft_policy(shares_cores=shares_cores)
        for _ in range(LEAST_STEPS + 2):
            policy.enter(32)
            policy.observe(roots=32, guesses=0, tokens=32, step_s=0.01, cycle_s=0.01)
        return policy.mode.mode

    assert mode_after_seconds(shares_cores=False) is Mode.DRAFTING
    assert mode_after_seconds(shares_cores=True) is Mode.PLAIN
