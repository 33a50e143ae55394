"""What steps of both engines take in this process, and how good the drafter's guesses are along the target's texts.

The engines take turns in one thread on one core, joined by an in-memory link, as `loadtest/gpu.py` joins them. Their
clock counts the time of that thread alone, so that neighbours on the machine do not count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from paceline.core.demand import Demand
from paceline.core.draft_policy import Allocation, FixedGamma, Goodput
from paceline.core.draft_scheduler import DraftLimits, VerifierSaid
from paceline.core.messages import Commit, CommittedTokens, DraftNodes, GenerateRequest, NodeGuess, OpenSession
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.step_time import StepCost
from paceline.core.target_events import DraftsArrived, LinkChanged, Submit, TargetLimits
from paceline.engine.drafter import DraftEngine
from paceline.engine.identity import model_identity
from paceline.engine.loading import load_decoder
from paceline.engine.target import TargetEngine
from paceline.planning.guesses import RecordedPlace

DRAFTER = "drafter"
# Rows between which a step's time is taken as linear.
KNOTS = (1, 4, 8, 16, 32, 64, 128, 256)
NUM_BLOCKS, MAX_ROWS = 2048, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step: rows, sessions of the engine, and seconds."""

    rows: int
    sessions: int
    seconds: float


class FixedButPriced(Goodput):
    """Verifies so many nodes of every session, but spends the time that the real policy takes to choose."""

    @property
    def price(self) -> float:
        """See `DraftPolicy`."""
        return 0.0

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: Sequence[bool] = ()) -> Allocation:
        """See `DraftPolicy`."""
        super().allocate(demands, other_rows=other_rows, joining=joining)
        return FixedGamma(gamma=self.max_nodes).allocate(demands)


class EnginesInTurn:
    """Both engines of a pair of checkpoints, stepping in turn.

    Args:
        target: Checkpoint folder.
        drafter: Checkpoint folder.
        dtype: Of the weights.
    """

    def __init__(self, target: Path, drafter: Path, dtype: str) -> None:
        self._target = load_decoder(target, dtype, "cpu", 1)
        self._drafter = load_decoder(drafter, dtype, "cpu", 1)
        self._identity = model_identity(target, "target", dtype)
        self._draft_identity = model_identity(drafter, "drafter", dtype)
        self._target.prepare(MAX_ROWS)

    def _draft_engine(self) -> DraftEngine:
        return DraftEngine(
            decoder=self._drafter,
            identity=self._draft_identity,
            num_blocks=NUM_BLOCKS,
            limits=DraftLimits(),
            clock=time.thread_time,
        )

    def run(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, gamma: int) -> Turns:
        """Runs all prompts at once to their full length, verifying `gamma` nodes of each a step."""
        turns = Turns()
        engine = TargetEngine(
            decoder=self._target,
            identity=self._identity,
            num_blocks=NUM_BLOCKS,
            limits=TargetLimits(
                max_num_seqs=64, max_num_batched_tokens=MAX_ROWS, max_model_len=self._identity.context_len
            ),
            policy=FixedButPriced(max_nodes=gamma) if gamma else FixedGamma(gamma=0),
            clock=time.thread_time,
        )
        draft = self._draft_engine()
        engine.handle(LinkChanged(address=DRAFTER, up=True))
        texts: dict[int, list[int]] = defaultdict(list)
        for serial, prompt in enumerate(prompts):
            request = _request(serial, prompt, max_tokens, drafted=gamma > 0)
            engine.handle(Submit(request=request, serial=serial, drafter_address=DRAFTER))
        while engine.num_sessions:
            # As many draft steps as fill most trees; what comes late is no matter here.
            for _ in range(gamma):
                if draft.has_work():
                    self._draft_once(draft, engine, turns)
            output = engine.step()
            report = output.report
            if not report.num_prefill_rows and report.num_decoding == len(prompts):
                sample = Sample(rows=report.num_rows, sessions=report.num_decoding, seconds=report.seconds)
                turns.target.append(sample)
            for serial, committed in output.committed:
                assert isinstance(committed, CommittedTokens), committed
                texts[serial] += committed.token_ids
            for messages in output.to_drafters.values():
                draft.handle(VerifierSaid(link=0, messages=messages))
        turns.texts = [texts[serial] for serial in range(len(prompts))]
        return turns

    def _draft_once(self, draft: DraftEngine, engine: TargetEngine, turns: Turns) -> None:
        output = draft.step()
        report = output.report
        # The first steps read prompts, far more rows than drafting ever has.
        if 0 < report.num_rows <= KNOTS[-1] and report.lag_tokens <= 32:
            turns.drafter.append(Sample(rows=report.num_rows, sessions=report.num_sessions, seconds=report.seconds))
        for nodes in output.to_verifiers.values():
            engine.handle(DraftsArrived(address=DRAFTER, messages=nodes, arrived_s=time.thread_time()))

    def record(self, prompt: Sequence[int], text: Sequence[int]) -> list[RecordedPlace]:
        """What the drafter guesses at every place of a text; the first token is the prompt's step's own."""
        draft = self._draft_engine()
        sampling = SamplingParams(max_tokens=len(text), temperature=0.0, ignore_eos=True)
        opened = OpenSession(
            session_id="record",
            epoch=1,
            token_ids=tuple(prompt),
            prompt_len=len(prompt),
            sampling=sampling,
            price=0.0,
            # One node and no more: the children of the root are grown, and nothing below them.
            room=1,
        )
        draft.handle(VerifierSaid(link=0, messages=[opened]))
        places: list[RecordedPlace] = []
        for index, token_id in enumerate(text):
            places.append(_place(_root_guesses(draft), token_id))
            commit = Commit(
                session_id="record", epoch=1, base_len=len(prompt) + index, token_ids=(token_id,), price=0.0, room=1
            )
            draft.handle(VerifierSaid(link=0, messages=[commit]))
        return places


@dataclass(slots=True)
class Turns:
    """Steps of both engines, and the target's texts."""

    target: list[Sample] = field(default_factory=list)
    drafter: list[Sample] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


def _request(serial: int, prompt: Sequence[int], max_tokens: int, *, drafted: bool) -> GenerateRequest:
    return GenerateRequest(
        session_id=f"session {serial}",
        epoch=1,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        speculation=SpeculationParams(enabled=drafted),
    )


def _root_guesses(draft: DraftEngine) -> list[NodeGuess]:
    found: list[NodeGuess] = []
    while draft.has_work():
        for messages in draft.step().to_verifiers.values():
            found += [guess for each in messages if isinstance(each, DraftNodes) for guess in each.nodes]
    return [guess for guess in found if not guess.parent_id]


def _place(guesses: Sequence[NodeGuess], token_id: int) -> RecordedPlace:
    ids = [guess.token_id for guess in guesses]
    rank = ids.index(token_id) if token_id in ids else None
    return RecordedPlace(rank=rank, confidences=tuple(round(guess.confidence, 3) for guess in guesses))


def fit(samples: Sequence[Sample]) -> tuple[StepCost, float]:
    """Step times as a table by rows plus so many seconds a session, by least squares over medians of equal steps."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.rows, sample.sessions].append(sample.seconds)
    most = max(rows for rows, _ in groups)
    knots = [knot for knot in KNOTS if knot <= most] + ([most] if most > KNOTS[0] and most not in KNOTS else [])
    columns, seconds, weights = [], [], []
    for (rows, sessions), times in groups.items():
        shares = [np.interp(rows, knots, np.eye(len(knots))[index]) for index in range(len(knots))]
        columns.append([*shares, sessions])
        seconds.append(median(times))
        weights.append(len(times) ** 0.5 / median(times))
    scale = np.array(weights)[:, None]
    # A little towards no cost of a session at all, where rows and sessions cannot be told apart.
    ridge = np.eye(len(knots) + 1)[-1:]
    found = np.linalg.lstsq(
        np.vstack([np.array(columns) * scale, ridge]), np.append(np.array(seconds) * scale[:, 0], 0.0), rcond=None
    )[0]
    session_s = max(0.0, float(found[-1]))
    table = np.maximum.accumulate(np.maximum(found[:-1], 1e-5))
    return StepCost(rows=tuple(knots), seconds=tuple(table.tolist())), session_s
