"""A simulated device inside a verifier: the real engine and scheduler, with a model that takes its time."""

from __future__ import annotations

import time
from dataclasses import replace

from typing_extensions import override

from paceline.core.acceptance import served_rules
from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.core.params import GRAMMAR, NGRAM, TIER_METHODS, SpeculationParams
from paceline.core.target_events import Submit, TargetEvent
from paceline.engine.grammar import Grammars
from paceline.engine.source_interface import source_class
from paceline.engine.target import LOCAL, TargetEngine
from paceline.model_service import refuse_settings
from paceline.service.learned import TunedState
from paceline.simulated.model import Simulation, num_pages
from paceline.verifier.config import NAME, SIMULATED, Speculation, VerifierConfig, speculation_from
from paceline.verifier.served import ALONE, GREEDY, SAMPLED, ServedEngine, longest_served, warm_up

# Our settings that the profile decides.
NOT_FOR_SIMULATED = {
    "max_num_seqs": "max_sessions of the profile's target",
    "max_num_batched_tokens": "max_rows of the profile's target",
}


class SimulatedEngine(TargetEngine):
    """An engine whose texts have one next token, whatever the temperature."""

    @override
    def handle(self, event: TargetEvent) -> None:
        if isinstance(event, Submit):
            greedy = replace(event.request.sampling, temperature=0.0)
            event = replace(event, request=replace(event.request, sampling=greedy))
        super().handle(event)


def simulated_engine(config: VerifierConfig) -> ServedEngine:
    """Prepares a simulated device.

    Raises:
        ConfigError: The profile, the tokenizer or another setting makes serving impossible.
    """
    speculation = speculation_from(config.speculative_config)
    simulation = Simulation.of(config.profile, config.model, config.acceptance)
    inside = speculation.own_draft is not None
    if inside:
        simulation = replace(simulation, profile=simulation.profile.sharing())
    refuse_settings(config, SIMULATED, NOT_FOR_SIMULATED)
    if beyond := sorted(set(speculation.methods) - {*TIER_METHODS, NGRAM, GRAMMAR}):
        raise ConfigError(f"{NAME}: the method {beyond[0]} needs a real model, and devices are simulated")
    facts = simulation.profile.target
    pages = num_pages(facts, config.num_kv_blocks)
    identity = simulation.identity(config.model_name)
    identity = replace(
        identity,
        context_len=longest_served(config.max_model_len, identity.context_len, pages),
        methods=speculation.methods,
        acceptance_rules=served_rules(speculation.acceptance, speculation.methods),
    )
    return ServedEngine(
        identity=identity,
        own_drafter=LOCAL if inside else "",
        default_rule=speculation.acceptance,
        grammars=Grammars(config.model, identity.vocab_size, identity.eos_token_ids),
        max_num_seqs=facts.max_sessions,
        make=lambda: _make(pages, simulation, identity, speculation),
        learned=TunedState(None, repr((identity.weights_hash, config.acceptance, config.speculative_config))),
        rehearsal=speculation.rehearsal(config.rehearse),
        max_rows=facts.max_rows,
    )


def _make(
    num_blocks: int, simulation: Simulation, identity: ModelIdentity, speculation: Speculation
) -> SimulatedEngine:
    facts, policy = simulation.profile.target, speculation.draft_policy(shares_cores=False)
    engine = SimulatedEngine(
        decoder=simulation.target(),
        identity=identity,
        num_blocks=num_blocks,
        limits=facts.target_limits,
        policy=policy,
        clock=time.monotonic,
        sources=[source_class(name)() for name in speculation.methods if name not in TIER_METHODS],
        default_rule=speculation.acceptance,
    )
    warm_up(engine, (GREEDY, SAMPLED, *ALONE), SpeculationParams(enabled=False))
    policy.start_from(facts.starting_cost())
    if speculation.own_draft is not None:
        draft = simulation.draft_engine(simulation.profile.colocated, identity, num_blocks=num_blocks)
        engine.draft_inside(draft, draft_model=identity.name)
    return engine
