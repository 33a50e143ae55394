"""A target engine and a draft engine in one thread, with the link between them in the test's hands."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.draft_policy import Goodput
from paceline.core.errors import PacelineError
from paceline.core.messages import Commit, GenerateRequest, GenerateResult, StepCommit, ToDrafter
from paceline.core.params import DRAFT_MODEL, EAGLE3, SamplingParams, SpeculationParams
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    DraftsArrived,
    LinkChanged,
    StepReport,
    Submit,
    TargetLimits,
    TargetOutput,
)
from paceline.engine.decoder import Decoder
from paceline.engine.draft_scheduler import DraftLimits, VerifierLeft, VerifierMessages
from paceline.engine.drafter import DraftEngine
from paceline.engine.eagle3 import draft_identity, load_eagle3
from paceline.engine.grammar import Grammars
from paceline.engine.loading import load_decoder, model_identity
from paceline.engine.loop import run_sync
from paceline.engine.source_interface import AnySource
from paceline.engine.target import TargetEngine
from paceline.verifier.config import Speculation
from paceline.verifier.own_engine import make_sources
from tests.support.clock import Clock
from tests.support.guesses import each_commit
from tests.support.steps import Step, steps_of

DRAFTER = "drafter:1"


@dataclass
class Generated:
    """What one session has given so far."""

    token_ids: list[int] = field(default_factory=list)
    messages: list[Step] = field(default_factory=list)
    result: GenerateResult | None = None
    error: PacelineError | None = None


class EnginePair:
    """Steps both engines and carries messages between them; the drafter may be lost and come back."""

    def __init__(
        self,
        target: Path,
        drafter: Path,
        *,
        policy: Goodput | None = None,
        width: int = 2,
        num_blocks: int = 256,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 128,
        dtype: str = "float32",
        methods: Sequence[str] = (),
        eagle3_model: Path | None = None,
        num_draft_blocks: int = 256,
        sources: Callable[[Decoder], list[AnySource]] | None = None,
        decoder: Decoder | None = None,
        grammars: Grammars | None = None,
        **heads: Any,
    ) -> None:
        self.clock = Clock(tick_s=0.001)
        self.grammars = grammars
        self.target_folder, self.head, self.num_draft_blocks = target, eagle3_model, num_draft_blocks
        self.drafter_folder, self.width, self.dtype = drafter, width, dtype
        identity = model_identity(target, "target")
        decoder = decoder or load_decoder(target, dtype, "cpu", 1)
        method = "+".join(methods) or (DRAFT_MODEL if eagle3_model is None else EAGLE3)
        speculation = Speculation(method=method, eagle3_model=eagle3_model, **heads)
        self.drafters_worked: list[bool] = []
        self.sources = make_sources(speculation, decoder) if sources is None else sources(decoder)
        self.target = TargetEngine(
            decoder=decoder,
            identity=identity,
            num_blocks=num_blocks,
            limits=TargetLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            policy=policy or Goodput(),
            clock=self.clock,
            sources=self.sources,
            use_threads=self.drafters_worked.append,
        )
        self.sessions: dict[str, Generated] = {}
        self.names: list[str] = []
        self.num_preempted = 0
        self.to_drafter: list[ToDrafter | Commit] = []
        self.reports: list[StepReport] = []
        self.draft: DraftEngine | None = None
        self.start_drafter()

    def start_drafter(self) -> None:
        """A fresh drafter, and a stream to it."""
        if self.head is None:
            decoder: Decoder = load_decoder(self.drafter_folder, self.dtype, "cpu", 1)
            identity = model_identity(self.drafter_folder, "drafter")
        else:
            decoder = load_eagle3(self.head, self.target_folder, self.dtype, "cpu", 1)
            identity = draft_identity(self.head, self.target_folder)
        self.draft = DraftEngine(
            decoder=decoder,
            identity=identity,
            num_blocks=self.num_draft_blocks,
            limits=DraftLimits(
                width=self.width,
                max_rows=16,
                max_rows_per_session=2,
                max_num_batched_tokens=128,
                max_num_seqs=64,
            ),
            clock=self.clock,
        )
        self.target.handle(LinkChanged(address=DRAFTER, up=True, wants_states=self.head is not None))

    def kill_drafter(self) -> None:
        """The drafter dies; the verifier sees its stream end."""
        self.draft = None
        self.target.handle(LinkChanged(address=DRAFTER, up=False))

    def submit(
        self,
        session_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        speculation: SpeculationParams | None = None,
        committed: Sequence[int] = (),
        salt: str = "",
    ) -> None:
        """Starts a session."""
        self.sessions[session_id] = Generated()
        self.names.append(session_id)
        self.target.handle(
            Submit(
                request=GenerateRequest(
                    session_id=session_id,
                    epoch=1,
                    prompt_token_ids=tuple(prompt),
                    committed_token_ids=tuple(committed),
                    sampling=sampling,
                    speculation=speculation or SpeculationParams(),
                    cache_salt=salt,
                ),
                number=len(self.names),
                drafter_address=DRAFTER,
                grammar=self.grammars.compile(sampling.grammar) if self.grammars and sampling.grammar else None,
            )
        )

    def cancel(self, session_id: str) -> None:
        """Its client leaves."""
        self.target.handle(Cancel(number=self.names.index(session_id) + 1))

    def round(self, draft_steps: int = 4) -> None:
        """One target step, then a few draft steps."""
        self._target_step()
        for _ in range(draft_steps):
            if self.draft is not None and self.draft.has_work():
                self._draft_step()

    def run(self, draft_steps: int = 4, max_rounds: int = 2000) -> None:
        """Plays rounds until every session has ended."""
        for _ in range(max_rounds):
            if not self.target.has_work():
                return
            self.round(draft_steps)
        raise AssertionError("sessions did not end")

    def _target_step(self) -> None:
        output = run_sync(self.target.step(tell=self.hear))
        self.num_preempted += output.report.counts["vllm:num_preemptions",]
        self.reports.append(output.report)
        self.hear(output)

    def hear(self, output: DrafterNews) -> None:
        """What the target says reaches clients and the drafter."""
        commit = output.commit if isinstance(output, TargetOutput) else StepCommit()
        for number, error in commit.errors.items():
            self.sessions[self.names[number - 1]].error = error
        for number, committed in steps_of(commit):
            generated = self.sessions[self.names[number - 1]]
            if not committed.running:
                generated.messages.append(committed)
            generated.token_ids += committed.token_ids
            generated.result = committed.result
        for messages in output.to_drafters.values():
            self.to_drafter += each_commit(messages)
            if self.draft is not None:
                self.draft.handle(VerifierMessages(link=1, messages=messages))

    def _draft_step(self) -> None:
        assert self.draft is not None
        for messages in run_sync(self.draft.step()).to_verifiers.values():
            self.target.handle(DraftsArrived(address=DRAFTER, messages=messages, arrived_s=self.clock()))

    def leave(self) -> None:
        """The verifier's stream ends at the drafter."""
        assert self.draft is not None
        self.draft.handle(VerifierLeft(link=1))


def prompts(count: int) -> list[list[int]]:
    """Returns prompts of 1 to 60 tokens, the same ones each time."""
    rng = random.Random(3)
    return [[rng.randrange(250) for _ in range(rng.randint(1, 60))] for _ in range(count)]
