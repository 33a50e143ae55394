"""Method `layer_skip`: some of the target's own layers draft for all of them (2309.08168, LayerSkip 2404.16710).

A guess is what the target would choose if it ended early. No other weights are needed, and KV of committed tokens is
the target's: only the root and guesses are computed. The root's KV goes where the next step writes it anew, that of
guesses into scratch slots, which are free again at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from paceline.core.errors import ConfigError
from paceline.core.goodput import is_worth
from paceline.core.pages import SlotPool
from paceline.core.params import LAYER_SKIP
from paceline.drafting.growing import Growth, Guess, best_guesses, root_is_next
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.packing import BatchBuilder, PrefixRows, TreeRow
from paceline.engine.source_interface import Followed, LocalSource, Turn
from paceline.forest.linking import CHILD_SHARE

logger = logging.getLogger(__name__)

# Times that the layers run after a step at most, and guesses below each node.
MOST_PASSES, WIDTH = 6, 3
# Share of the layers that drafts unless others are named.
EXIT_SHARE = 0.25
# First guesses after which a target is judged, and the least share of them that must be right. SmolLM2-135M, which was
# not trained for it, reached 0.03 with 7 of its 30 layers, and 0.46 with 28.
NUM_JUDGED, LEAST_RIGHT = 100, 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class ExitFollower:
    """The source at work on one session.

    Attributes:
        session: The session.
        guess: Position and id of its latest best first guess; None: it was judged, or there is none.
    """

    session: Followed
    guess: tuple[int, int] | None = None


# Scratch slots of a guess's path; those of the root are none.
_Slots = tuple[int, ...]
_Leaf = tuple[Turn[ExitFollower], Growth[_Slots], Guess[_Slots]]


class EarlyExitSource(LocalSource[ExitFollower]):
    """Grows trees by passes through some of the target's layers.

    Args:
        layers: Layers that draft, in the order in which they run.
        cost: Time of a pass through them as a share of a step's.
        width: Guesses below each node.
    """

    name = LAYER_SKIP

    def __init__(
        self,
        decoder: Decoder,
        layers: tuple[int, ...],
        *,
        cost: float,
        width: int = WIDTH,
    ) -> None:
        self._decoder = decoder
        self._layers = layers
        self._cost = cost
        self._width = width
        self._place: tuple[KVCache, SlotPool] | None = None
        self._num_judged = self._num_right = 0

    @override
    @classmethod
    def make(cls, settings: Any, decoder: Decoder) -> Self:
        """Takes the first layers unless others are named.

        Raises:
            ConfigError: The target has no such layers, or cannot run them alone.
        """
        count = decoder.config.num_layers
        if not decoder.backend.layer_bytes:
            raise ConfigError(
                f"method {LAYER_SKIP} runs some layers alone, and {decoder.config.architecture} is served through "
                "transformers' own modules, which run as a whole: name another method"
            )
        layers = settings.first_layers or tuple(range(max(1, round(count * EXIT_SHARE))))
        if layers[-1] >= count:
            raise ConfigError(
                f"--speculative-config: layer {layers[-1]} is beyond the target's {count} layers, 0 to {count - 1}"
            )
        return cls(decoder, layers, cost=decoder.share(layers))

    @override
    def attach(self, cache: KVCache, scratch: SlotPool) -> None:
        self._place = (cache, scratch)

    @override
    def follow(self, session: Followed) -> ExitFollower:
        return ExitFollower(session=session)

    @override
    def grow(self, turns: Sequence[Turn[ExitFollower]]) -> None:
        assert self._place is not None, "the engine attaches a source before it asks"
        self._judge(turns)
        cache, scratch = self._place
        ready = [
            (turn, Growth[_Slots](turn, LAYER_SKIP)) for turn in turns if _has_place_for_root(turn.follower.session)
        ]
        leaves = [(turn, growth, Guess(turn.tree.root, 1.0, _Slots())) for turn, growth in ready]
        slots: list[int] = []
        try:
            for _ in range(MOST_PASSES):
                self._expand(leaves, cache, scratch, slots)
                prospects = [growth.prospect(CHILD_SHARE) for _, growth in ready]
                expected, gain = sum(each for each, _ in prospects), sum(each for _, each in prospects)
                if not is_worth(gain, expected, cost_s=self._cost, step_s=1.0):
                    break
                leaves = [(turn, growth, best) for turn, growth in ready if (best := growth.take()) is not None]
        finally:
            scratch.give_back(*slots)
        for _, growth in ready:
            while growth.take() is not None:
                pass

    def _expand(self, leaves: Sequence[_Leaf], cache: KVCache, scratch: SlotPool, slots: list[int]) -> None:
        """Runs a pass: computes roots or leaves, and offers guesses below them; notes the slots it takes."""
        builder = BatchBuilder()
        computed: list[tuple[_Leaf, list[int], _Slots]] = []
        for leaf in leaves:
            turn, _, guess = leaf
            session, path = turn.follower.session, turn.tree.path(guess.node)
            own, length = guess.state, len(session.tokens)
            if not path:
                builder.add_prefixes([PrefixRows(session.pages, length - 1, length, wants_logits=True)])
            else:
                slot = scratch.take()
                if slot is None:
                    break
                slots.append(slot)
                own = (*own, slot)
                builder.add_nodes([TreeRow(session.pages, path[-1], length + len(path) - 1, own)])
            computed.append((leaf, path, own))
        if computed:
            logits = self._decoder.forward(builder.build(), cache, self._layers).cpu().numpy()
            for ((turn, growth, guess), path, own), row in zip(computed, logits, strict=True):
                session = turn.follower.session
                found = best_guesses(session, row, len(session.tokens) + len(path), path, self._width)
                growth.nominate(guess, ((token_id, confidence, own) for token_id, confidence in found))
                if found and not path:
                    turn.follower.guess = (len(session.tokens), found[0][0])

    def _judge(self, turns: Sequence[Turn[ExitFollower]]) -> None:
        """Compares first guesses with the committed tokens; warns once if hardly any is right."""
        for follower in (turn.follower for turn in turns):
            tokens, guess = follower.session.tokens, follower.guess
            if self._num_judged == NUM_JUDGED or guess is None or guess[0] >= len(tokens):
                continue
            follower.guess = None
            self._num_judged += 1
            self._num_right += tokens[guess[0]] == guess[1]
            if self._num_judged == NUM_JUDGED and self._num_right < LEAST_RIGHT * NUM_JUDGED:
                logger.warning(
                    "%s guessed %d of %d tokens right with %d layers: it needs a target that was trained to end early, "
                    "such as LayerSkip models; name another method in --speculative-config",
                    LAYER_SKIP,
                    self._num_right,
                    NUM_JUDGED,
                    len(self._layers),
                )


def _has_place_for_root(session: Followed) -> bool:
    """Whether all tokens before the root are computed, and the root has a slot; takes a page for it if need be."""
    return root_is_next(session) and session.pages.reserve(len(session.tokens))
