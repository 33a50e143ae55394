"""Makes the sources inside a verifier that its methods name, and has the target keep what they read."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.params import GRAMMAR, LAYER_SKIP, MEDUSA, NGRAM, SUFFIX
from paceline.drafting.early_exit import EarlyExitSource
from paceline.drafting.forced import GrammarSource
from paceline.drafting.medusa import MedusaSource
from paceline.drafting.suffix import TextSource
from paceline.engine.decoder import Decoder
from paceline.engine.eagle3 import load_fusion
from paceline.engine.medusa_heads import MedusaHeads
from paceline.engine.source_interface import AnySource
from paceline.verifier.config import Speculation

# Share of the layers that drafts unless others are named.
EXIT_SHARE = 0.25


def make_sources(speculation: Speculation, decoder: Decoder) -> list[AnySource]:
    """Loads heads where methods need them; the decoder has made no cache yet.

    Raises:
        ConfigError: Heads or layers do not fit the target; says why.
    """
    sources: list[AnySource] = [TextSource(method) for method in speculation.methods if method in (NGRAM, SUFFIX)]
    if GRAMMAR in speculation.methods:
        sources.append(GrammarSource())
    if MEDUSA in speculation.methods:
        assert speculation.medusa_model is not None, "checked with the other settings"
        sources.append(MedusaSource(MedusaHeads.load(speculation.medusa_model, decoder)))
        decoder.keep_states(replace(decoder.states, hidden_size=decoder.hidden_size, final=True))
    if LAYER_SKIP in speculation.methods:
        sources.append(_early_exit(speculation.first_layers, decoder))
    if speculation.head is not None:
        decoder.keep_states(load_fusion(speculation.head, decoder))
    return sources


def _early_exit(layers: tuple[int, ...], decoder: Decoder) -> EarlyExitSource:
    count = decoder.config.num_layers
    if not decoder.backend.layer_bytes:
        raise ConfigError(
            f"method {LAYER_SKIP} runs some layers alone, and {decoder.config.architecture} is served through "
            "transformers' own modules, which run as a whole: name another method"
        )
    layers = layers or tuple(range(max(1, round(count * EXIT_SHARE))))
    if layers[-1] >= count:
        raise ConfigError(
            f"--speculative-config: layer {layers[-1]} is beyond the target's {count} layers, 0 to {count - 1}"
        )
    return EarlyExitSource(decoder, layers, cost=decoder.share(layers))
