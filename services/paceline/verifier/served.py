"""A target model as a verifier serves it, whichever engine computes it: what it promises, refuses and runs first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.core.acceptance import rule_of
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.pages import longest_session
from paceline.core.params import COUPLED, REJECTION, TIER_METHODS, SamplingParams, SpeculationParams, check_token_ids
from paceline.core.target_events import DrafterNews, Submit, TargetEvent
from paceline.engine.grammar import Grammars
from paceline.engine.loop import Stepper, run_sync
from paceline.service.learned import NO_STATE, Learned, TunedState
from paceline.verifier.config import NEVER
from paceline.verifier.vllm.helper_line import HelperLine

# Parameters of the first sessions of an engine: by logits alone or not, with log probabilities or without.
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, ignore_eos=True)
ALONE = (replace(GREEDY, logprobs=1), replace(SAMPLED, frequency_penalty=0.1))
# No engine counts as hung before the time of so many full steps, whatever `--engine-stall-s` is.
NUM_FULL_STEPS = 2


class TargetStepper(Stepper[TargetEvent, DrafterNews], Protocol):
    """An engine that runs the target model."""

    def learned(self) -> Learned:
        """Learned tuning for a successor."""
        ...

    @property
    def at_stake(self) -> tuple[int, ...]:
        """Numbers of the sessions that a failure now is blamed on."""
        ...

    @property
    def full_step_s(self) -> float:
        """Expected seconds of a step of all sessions that fit; 0: not known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An engine that is not loaded yet, and what a verifier promises with it.

    Attributes:
        identity: Identity of the model as served: its context length is the longest session, prompt and output.
        own_drafter: Names a drafter inside the engine; empty: the verifier pairs sessions with drafters of the tier.
        default_rule: Acceptance rule of requests that name none.
        grammars: Compiles the grammars of requests; None: none are served.
        max_num_seqs: Most sessions that run at once.
        make: Loads the model; called in the device's thread.
        learned: Where the engine keeps what it learns.
        rehearsal: When it rehearses, as `--rehearse` says.
        max_rows: Most rows of a step; 0: not known.
        helper: Learns for the engine in another process, of a drafter that only it knows; None: the engine does.
    """

    identity: ModelIdentity
    own_drafter: str = ""
    default_rule: str = COUPLED
    grammars: Grammars | None = None
    max_num_seqs: int
    make: Callable[[], TargetStepper]
    learned: TunedState = NO_STATE
    rehearsal: str = NEVER
    max_rows: int = 0
    helper: HelperLine | None = None

    def check(self, request: GenerateRequest) -> None:
        """Refuses what cannot be served here, however idle the engine is.

        Raises:
            InvalidRequestError: Names the field and the limit.
        """
        identity = self.identity
        check_token_ids("prompt_token_ids", request.prompt_token_ids, identity.vocab_size)
        check_token_ids("committed_token_ids", request.committed_token_ids, identity.vocab_size)
        predicted = request.speculation.predicted_token_ids
        check_token_ids("speculation.predicted_token_ids", predicted, identity.vocab_size)
        request.sampling.check_vocabulary(identity.vocab_size, identity.eos_token_ids)
        self._check_speculation(request.speculation)
        self._check_lengths(request)

    def _check_speculation(self, speculation: SpeculationParams) -> None:
        methods = self.identity.methods
        unserved = sorted(set(speculation.methods) - set(methods))
        if unserved:
            raise InvalidRequestError(
                "speculation.method", f"{unserved[0]} is not served here, only {', '.join(methods)}"
            )
        rule = rule_of(speculation, self.default_rule)
        wanted = speculation.methods or methods
        if rule == REJECTION and not set(wanted) & set(TIER_METHODS):
            raise InvalidRequestError(
                "speculation.acceptance",
                f"{rule} needs the method {' or '.join(TIER_METHODS)}, and here it is {'+'.join(wanted)}",
            )

    def _check_lengths(self, request: GenerateRequest) -> None:
        sampling, committed = request.sampling, request.committed_token_ids
        prompt_len, context_len = len(request.prompt_token_ids), self.identity.context_len
        if prompt_len + sampling.max_tokens > context_len:
            raise InvalidRequestError(
                "max_tokens",
                f"{prompt_len} prompt tokens + {sampling.max_tokens} output tokens exceed the context of {context_len}",
            )
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.identity.eos_token_ids)}
        if not ends.isdisjoint(committed):
            raise InvalidRequestError("committed_token_ids", "must not hold a token that ends the text")
        if len(committed) >= sampling.max_tokens:
            raise InvalidRequestError("committed_token_ids", "must be fewer than max_tokens")


def longest_served(asked: int, context_len: int, num_pages: int) -> int:
    """Longest session, prompt and output, that a model and its pages allow: what is announced, and what is admitted.

    Raises:
        ConfigError: `--max-model-len` is more than either allows.
    """
    paged = longest_session(num_pages)
    allowed = min(context_len, paged)
    if asked > allowed:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's {context_len} tokens or the {paged} tokens of "
            f"{num_pages} pages (--num-kv-blocks) allow"
        )
    return asked or allowed


def warm_up(engine: TargetStepper, samplings: Sequence[SamplingParams], speculation: SpeculationParams) -> None:
    """Runs a short session with each of these parameters, so that the first user finds everything compiled."""
    for index, sampling in enumerate(samplings):
        request = GenerateRequest(
            session_id=f"warm-up-{index}",
            epoch=0,
            prompt_token_ids=(0,),
            sampling=sampling,
            speculation=speculation,
        )
        engine.handle(Submit(request=request, number=index))
    while engine.has_work():
        run_sync(engine.step())
