"""Steps of verifier sessions without a model: guesses and rows of logits in, verdicts out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.messages import StepCommit
from paceline.engine.judging import Verification
from paceline.engine.pending import HostPending, VerifyRequest, choices_of
from paceline.engine.planned_step import Part, StepPlan
from paceline.engine.sampler import RowSampler
from paceline.engine.target_session import TargetSession
from paceline.forest import Guesses

# Parent and token of each guess, parents first; parent -1: it hangs below the last committed token.
Tree = Sequence[tuple[int, int]]


def columns(trees: Sequence[Tree], lengths: Sequence[int]) -> Guesses:
    """Guesses as a step verifies them, beyond so many committed tokens each."""
    positions = list[int]()
    for tree, length in zip(trees, lengths, strict=True):
        depths = [0]
        for parent, _ in tree:
            depths.append(1 + depths[parent + 1])
        positions += [length - 1 + depth for depth in depths[1:]]
    nodes = [node for tree in trees for node in tree]
    return Guesses(
        counts=np.array([len(tree) for tree in trees], np.int32),
        tokens=np.array([token for _, token in nodes], np.int32),
        positions=np.array(positions, np.int32),
        parents=np.array([parent for parent, _ in nodes], np.int32),
        kv=np.zeros(len(nodes), np.int32),
    )


def judging(sessions: Sequence[TargetSession], trees: Sequence[Tree], logits: npt.NDArray[np.float32]) -> Verification:
    """A step that is over.

    Args:
        logits: `[rows, vocab]`, of each session's last committed token, and of its guesses behind it.
    """
    lengths = [session.committed_len for session in sessions]
    parts = [
        Part(session, length - 1, length, len(tree), decodes=True)
        for session, length, tree in zip(sessions, lengths, trees, strict=True)
    ]
    plan = StepPlan(0.0, drafters_work=False, decoding=parts, reading=[], guesses=columns(trees, lengths))
    rows = np.array([1 + len(tree) for tree in trees])
    step = Verification(plan, (np.cumsum(rows) - rows).tolist())
    step.follow(HostPending(logits))
    return step


def chosen(step: Verification, place: int) -> list[int]:
    """What a session of a step commits."""
    committed = StepCommit()
    step.commit(place, committed)
    return committed.tokens


def judge(session: TargetSession, tree: Tree, logits: npt.NDArray[np.float32]) -> StepCommit:
    """What one session commits."""
    committed = StepCommit()
    judging([session], [tree], logits).commit(0, committed)
    return committed


def choose(sampler: RowSampler, logits: npt.NDArray[np.float32], position: int, path: Sequence[int] = ()) -> int:
    """The token for a position from one row, behind a path."""
    row, none = logits[None].copy(), np.zeros(1, np.int64)
    if sampler.changes_rows:
        sampler.change(row[0], path)
    no_guesses = (none, none, none[:0].astype(np.int32), none[:0].astype(np.int32))
    walked = HostPending(row).follow(
        VerifyRequest(none, np.array([position], np.int64), choices_of([sampler.choice]), *no_guesses)
    )
    if not walked.counts[0]:
        sampler.require_usable(float(row.max()))
    return int(walked.tokens[0])
