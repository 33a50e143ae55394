"""Makes the sources of guesses inside a verifier, and has the target keep the states that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.params import LAYER_SKIP, TIER_METHODS
from paceline.drafting.early_exit import EarlyExitSource
from paceline.drafting.forced import GrammarSource
from paceline.drafting.medusa import MedusaSource
from paceline.drafting.suffix import TextSource
from paceline.engine.decoder import Decoder
from paceline.engine.eagle3 import load_fusion
from paceline.engine.medusa_heads import MedusaHeads
from paceline.engine.source_interface import AnySource
from paceline.service.plugins import SOURCES
from paceline.verifier.config import Speculation

# Share of the layers that drafts unless others are named.
EXIT_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetup:
    """Input of the function that makes a source.

    Attributes:
        name: The method's name, which the source must have too.
        decoder: The target; it has made no cache yet.
        speculation: `--speculative-config` decoded.
    """

    name: str
    decoder: Decoder
    speculation: Speculation

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of this method in `--speculative-config`."""
        return self.speculation.options_of(self.name)


def make_sources(speculation: Speculation, decoder: Decoder) -> list[AnySource]:
    """Loads heads where methods need them; the decoder has made no cache yet.

    Raises:
        ConfigError: Heads or layers do not fit the target, or a source of another package cannot be made.
    """
    # Cheapest first, as in the registry.
    named = sorted(set(speculation.methods) - set(TIER_METHODS), key=SOURCES.names.index)
    setups = (SourceSetup(name=name, decoder=decoder, speculation=speculation) for name in named)
    sources: list[AnySource] = [SOURCES.make(setup.name, setup) for setup in setups]
    if speculation.head is not None:
        decoder.keep_states(load_fusion(speculation.head, decoder))
    return sources


def text(setup: SourceSetup) -> AnySource:
    """Makes the source of `ngram` or `suffix`."""
    return TextSource(setup.name)


def grammar(_: SourceSetup) -> AnySource:
    """Makes the source of `grammar`."""
    return GrammarSource()


def medusa(setup: SourceSetup) -> AnySource:
    """Makes the source of `medusa`, and has the target keep its final states.

    Raises:
        ConfigError: The heads do not fit the target.
    """
    decoder = setup.decoder
    assert setup.speculation.medusa_model is not None, "checked with the other settings"
    source = MedusaSource(MedusaHeads.load(setup.speculation.medusa_model, decoder))
    decoder.keep_states(replace(decoder.states, hidden_size=decoder.hidden_size, final=True))
    return source


def early_exit(setup: SourceSetup) -> AnySource:
    """Makes the source of `layer_skip`.

    Raises:
        ConfigError: The target cannot run layers alone, or has too few.
    """
    decoder = setup.decoder
    count = decoder.config.num_layers
    if not decoder.backend.layer_bytes:
        raise ConfigError(
            f"method {LAYER_SKIP} runs some layers alone, and {decoder.config.architecture} is served through "
            "transformers' own modules, which run as a whole: name another method"
        )
    layers = setup.speculation.first_layers or tuple(range(max(1, round(count * EXIT_SHARE))))
    if layers[-1] >= count:
        raise ConfigError(
            f"--speculative-config: layer {layers[-1]} is beyond the target's {count} layers, 0 to {count - 1}"
        )
    return EarlyExitSource(decoder, layers, cost=decoder.share(layers))
