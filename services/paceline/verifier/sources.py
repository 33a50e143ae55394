"""Makes the sources inside a verifier that its methods name, and has the target keep what they read."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.params import MEDUSA, NGRAM, SUFFIX
from paceline.drafting.medusa import MedusaSource
from paceline.drafting.suffix import TextSource
from paceline.engine.decoder import Decoder
from paceline.engine.eagle3 import load_fusion
from paceline.engine.medusa_heads import MedusaHeads
from paceline.engine.sources import AnySource
from paceline.verifier.config import Speculation


def make_sources(speculation: Speculation, decoder: Decoder) -> list[AnySource]:
    """Loads heads where methods need them; the decoder has made no cache yet.

    Raises:
        ConfigError: Heads do not fit the target.
    """
    sources: list[AnySource] = [TextSource(method) for method in speculation.methods if method in (NGRAM, SUFFIX)]
    if MEDUSA in speculation.methods:
        assert speculation.medusa_model is not None, "checked with the other settings"
        sources.append(MedusaSource(MedusaHeads.load(speculation.medusa_model, decoder)))
        decoder.keep_states(replace(decoder.states, hidden_size=decoder.hidden_size, final=True))
    if speculation.eagle3_model is not None:
        decoder.keep_states(load_fusion(speculation.eagle3_model, decoder))
    return sources
