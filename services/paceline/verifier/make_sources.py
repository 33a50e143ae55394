"""Makes the sources of guesses inside a verifier, and has the target keep the states that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.params import GRAMMAR, LAYER_SKIP, MEDUSA, NGRAM
from paceline.drafting.early_exit import EarlyExitSource
from paceline.drafting.medusa import MedusaSource
from paceline.drafting.model_free import GrammarSource, NgramSource
from paceline.engine.decoder import Decoder
from paceline.engine.eagle3 import load_fusion
from paceline.engine.medusa_heads import MedusaHeads
from paceline.engine.source_interface import AnySource
from paceline.verifier.config import Speculation

# Share of the layers that drafts unless others are named.
EXIT_SHARE = 0.25


def _medusa(speculation: Speculation, decoder: Decoder) -> MedusaSource:
    """Has the target keep its final states, too."""
    assert speculation.medusa_model is not None, "checked with the other settings"
    source = MedusaSource(MedusaHeads.load(speculation.medusa_model, decoder))
    decoder.keep_states(replace(decoder.states, hidden_size=decoder.hidden_size, final=True))
    return source


def _early_exit(speculation: Speculation, decoder: Decoder) -> EarlyExitSource:
    count = decoder.config.num_layers
    if not decoder.backend.layer_bytes:
        raise ConfigError(
            f"method {LAYER_SKIP} runs some layers alone, and {decoder.config.architecture} is served through "
            "transformers' own modules, which run as a whole: name another method"
        )
    layers = speculation.first_layers or tuple(range(max(1, round(count * EXIT_SHARE))))
    if layers[-1] >= count:
        raise ConfigError(
            f"--speculative-config: layer {layers[-1]} is beyond the target's {count} layers, 0 to {count - 1}"
        )
    return EarlyExitSource(decoder, layers, cost=decoder.share(layers))


# All sources of guesses inside a verifier by the names of their methods, the cheapest first.
SOURCES: dict[str, Callable[[Speculation, Decoder], AnySource]] = {
    NGRAM: lambda *_: NgramSource(),
    GRAMMAR: lambda *_: GrammarSource(),
    MEDUSA: _medusa,
    LAYER_SKIP: _early_exit,
}


def make_sources(speculation: Speculation, decoder: Decoder) -> list[AnySource]:
    """Loads heads where methods need them; the decoder has made no cache yet.

    Raises:
        ConfigError: Heads or layers do not fit the target, or it cannot run layers alone.
    """
    sources = [make(speculation, decoder) for name, make in SOURCES.items() if name in speculation.methods]
    if speculation.head is not None:
        decoder.keep_states(load_fusion(speculation.head, decoder))
    return sources
