"""Which chains vLLM verifies next: sessions, drafters and the controller, as arithmetic.

vLLM schedules, runs and judges; after every step it reports what each row has committed, and requests guesses. So a
step here is `commit`, some waiting (`patience_s`), and `chains`; or `take`, where the proposer has found them on the
board. It reads no clock and sends nothing: its caller takes the messages for drafters by `take_outgoing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.calibration import CalibrationStore
from paceline.core.draft_policy import Goodput
from paceline.core.drafter_tier import DrafterTier
from paceline.core.errors import RemoteProtocolError
from paceline.core.link import SessionLink, commit
from paceline.core.messages import GenerateRequest, ToDrafter
from paceline.core.params import METHODS, TIER_METHODS, SamplingParams, SpeculationParams
from paceline.core.step_drafts import Choice, StepDrafts
from paceline.core.target_events import DraftsArrived, LinkChanged, StepReport, num_accepted_of
from paceline.core.tree import DraftTree
from paceline.forest import NONE, Calls, Forest, Gathered, Ints, rows_of, warm_up
from paceline.service.learned import learning
from paceline.tier.drafters import Drafters
from paceline.vllm.board import MOST_NODES, BoardTree, SharedTrees
from paceline.vllm.step_message import RowTokens, StepMessage

# Steps of a new vLLM that teach nothing.
WARM_UP_STEPS = 2
# Key of the drafters' calibration: all of them share it, since they have other addresses after a restart.
DRAFTERS = "drafters"
# vLLM judges a guess by the target's probability of it alone, so the best guess is the drafter's likeliest token.
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class ChainSession:
    """A row of vLLM from its first step to its last.

    Attributes:
        number: Its name at the proposer, which it keeps when it begins anew.
        tokens: Committed tokens.
        max_chain: Most guesses in a step.
        methods: Methods of drafters that may draft for it.
        verifies: The guesses that the step under way verifies.
        reads: Its prompt is being read.
        shown: Version of the tree that stands on the board: committed tokens, nodes, guesses since the last commit.
    """

    number: int
    tokens: list[int]
    tree: DraftTree
    link: SessionLink
    max_chain: int
    methods: Sequence[str]
    verifies: list[int] = field(default_factory=list)
    reads: bool = False
    shown: tuple[int, int, int] = (0, 0, 0)


class ChainScheduler:
    """The tier's part of vLLM's steps.

    Args:
        name: Begins the names of its sessions at drafters.
        policy: Which guesses a step verifies.
        drafters: Pairs sessions with drafters.
        methods: Methods of drafters that may be used.
        vocab_size: The target's vocabulary size.
        max_model_len: Most tokens of a session, prompt and output.
        max_chain: Most guesses of a session in a step.
    """

    def __init__(
        self,
        *,
        name: str,
        policy: Goodput,
        drafters: Drafters,
        methods: Sequence[str],
        vocab_size: int,
        max_model_len: int,
        max_chain: int,
    ) -> None:
        self.report = StepReport()
        self._name = name
        self._policy = policy
        self._drafters = drafters
        self._methods = methods
        self._max_model_len, self._max_chain = max_model_len, max_chain
        self._vocab_size = vocab_size
        self._forest = Forest(METHODS)
        self._tier = DrafterTier(vocab_size, self._forest)
        warm_up(self._forest)
        self._drafts = StepDrafts(policy, self._forest)
        # When the last step began, and the steps left that teach nothing: the first ones are slow.
        self._began_s: float | None = None
        self._warm_up_steps = WARM_UP_STEPS
        self._sessions: dict[int, ChainSession] = {}
        self._link_numbers = itertools.count(1)
        # Rows of the finished step, and those that take guesses in the next one.
        self._rows: list[ChainSession] = []
        # By address.
        self._calibrations: CalibrationStore[str] = CalibrationStore(self._forest, lambda _: DRAFTERS)
        self._committed_s = 0.0

    @property
    def num_sessions(self) -> int:
        """Sessions that vLLM has reported and not closed."""
        return len(self._sessions)

    @property
    def drafts(self) -> bool:
        """Whether drafters are active; if not, the proposer need not wait for chains."""
        return self._drafts.drafters_work(_forest_rows(self._rows))

    # Events

    def commit(self, message: StepMessage, now_s: float) -> None:
        """A step of vLLM has ended.

        Args:
            message: The proposer's report.

        Raises:
            KeyError, ValueError: It continues a session that was never opened, or leaves out tokens; the proposer must
                start over.
        """
        for number in message.closed:
            self._close(self._sessions.get(number))
        self._take_time(message)
        self._rows = [self._session_of(row) for row in message.rows]
        self._commit_tokens(message.rows)
        fresh = [session for session, row in zip(self._rows, message.rows, strict=True) if not row.base_len]
        self._drafts.call(_forest_rows(fresh))
        self._tier.update([session.link for session in self._rows], now_s)
        self._committed_s = now_s

    def _take_time(self, message: StepMessage) -> None:
        decoding = {session.number for session in self._rows if not session.reads}
        roots, guesses = len(message.rows), sum(row.num_verified for row in message.rows)
        tokens = sum(len(row.token_ids) for row in message.rows)
        counts = all(row.session in decoding and row.base_len and not row.reads for row in message.rows)
        # The proposer may have taken guesses from the board before it heard that drafting is over.
        counts = counts and (self._policy.drafts or not guesses)
        last_s, self._began_s = self._began_s, message.began_s
        if not counts or not roots or last_s is None or message.began_s <= last_s:
            return
        seconds = message.began_s - last_s
        self.report.seconds, self.report.num_rows = seconds, roots + guesses
        if self._warm_up_steps:
            self._warm_up_steps -= 1
            return
        with learning(self._policy.forget):
            self._policy.observe(roots=roots, guesses=guesses, tokens=tokens, step_s=seconds, cycle_s=seconds)

    def _session_of(self, row: RowTokens) -> ChainSession:
        session = self._sessions.get(row.session)
        if not row.base_len or session is None:
            self._close(session)
            session = self._open(row)
        session.reads = row.reads
        return session

    def _open(self, row: RowTokens) -> ChainSession:
        if row.base_len:
            raise KeyError(f"session {row.session} goes on and was never opened")
        # Ids beyond the vocabulary, such as those of pictures, mean nothing to a drafter.
        drafted = row.most_guesses > 0 and min(row.token_ids) >= 0 and max(row.token_ids) < self._vocab_size
        methods = self._methods if drafted else ()
        address = self._drafters.choose(methods)
        session = self._sessions[row.session] = self._session(row, methods, address)
        self._drafters.count(address, +1)
        self._tier.connect(session.link)
        return session

    def _session(self, row: RowTokens, methods: Sequence[str], address: str) -> ChainSession:
        tokens = list(row.token_ids)
        max_chain, calibrations = min(self._max_chain, row.most_guesses), self._calibrations_for(address)
        tree = DraftTree(self._forest, tokens, calibrations)
        request = GenerateRequest(
            session_id=f"{self._name}/{row.session}",
            epoch=0,
            prompt_token_ids=tuple(tokens),
            sampling=GREEDY,
            speculation=SpeculationParams(),
        )
        number, price = next(self._link_numbers), self._policy.price
        link = SessionLink(request, number, tokens, tree, calibrations, address=address, price=price)
        # Its end is not known, and vLLM verifies no trees.
        self._forest.links.bound(
            tree.row,
            most_guesses=max_chain,
            last_len=self._max_model_len,
            waits_up_to=self._max_model_len,
            takes_chains=True,
        )
        return ChainSession(
            number=row.session,
            tokens=tokens,
            tree=tree,
            link=link,
            max_chain=max_chain,
            methods=methods,
        )

    def _commit_tokens(self, rows: Sequence[RowTokens]) -> None:
        """Commits the tokens of sessions that go on."""
        going_on = [
            (session, row) for session, row in zip(self._rows, rows, strict=True) if row.base_len and row.token_ids
        ]
        for session, row in going_on:
            if row.base_len != len(session.tokens):
                raise ValueError(f"session {row.session} has {len(session.tokens)} tokens, not {row.base_len}")
            # vLLM may have verified fewer than it was sent.
            self._forest.drop_kv(session.tree.row, len(session.tokens) + row.num_verified)
        tokens = [token_id for _, row in going_on for token_id in row.token_ids]
        ends = [*itertools.accumulate(len(row.token_ids) for _, row in going_on)]
        links = [session.link for session, _ in going_on]
        done = commit(self._forest, links, ends, tokens)
        self.report.count_nodes(self._forest.sources, done.counts)
        self._tier.count_commits(links, ends, done)
        num_verified = list[int]()
        for session, row in going_on:
            num_verified.append(min(len(session.verifies), row.num_verified))
            session.verifies = []
        self.report.count_rounds(num_verified, num_accepted_of(done.accepted, ends), done.hits.tolist())

    def _close(self, session: ChainSession | None) -> None:
        if session is None:
            return
        self._tier.part(session.link)
        session.tree.close()
        self._drafters.count(session.link.address, -1)
        del self._sessions[session.number]

    def receive(self, event: DraftsArrived) -> None:
        """Merges messages of a drafter."""
        self._tier.receive([event], self.report)

    def change_link(self, event: LinkChanged, now_s: float) -> None:
        """A drafter was reached or lost."""
        self._tier.change(event, now_s)

    def pair_anew(self, now_s: float) -> int:
        """Gives sessions another drafter if their own has gone, or their first one; returns how many changed."""
        changed = [
            (session, address)
            for session in self._sessions.values()
            if (address := self._drafters.choose(session.methods, session.link.address)) != session.link.address
        ]
        for session, address in changed:
            self._drafters.count(session.link.address, -1)
            self._drafters.count(address, +1)
            session.link.calibrations = self._calibrations_for(address)
            self._tier.pair(session.link, address, now_s)
        return len(changed)

    # Outcomes

    def patience_s(self, now_s: float) -> float:
        """Seconds for which it pays to wait for guesses; see `StepDrafts.worth_waiting`."""
        sessions = [session for session in self._rows if not session.reads]
        rows = _forest_rows(sessions)
        self._drafts.mark_silent(rows, now_s, self.report)
        if not self.drafts or len(sessions) < len(self._rows):
            return 0.0
        waits = self._drafts.waits(rows, now_s)
        return self._drafts.worth_waiting(rows, waits, idle_s=now_s - self._committed_s)

    def chains(self) -> list[list[int]]:
        """Returns guesses for the next step, a list for each row; also decides which sessions are drafted for."""
        decoding, choice = self._decide()
        self._verify(decoding, choice.counts, choice.taken)
        return [session.verifies for session in self._rows]

    def take(self, chains: Sequence[Sequence[int]]) -> None:
        """The proposer has taken guesses from the board, a list for each row; else as `chains`."""
        decoding, _ = self._decide()
        rows = _forest_rows(decoding)
        told = [list(chain) for session, chain in zip(self._rows, chains, strict=True) if not session.reads]
        picked = self._forest.best(rows, rows_of(map(len, told)), np.ones(len(rows), np.bool_))
        counts = (picked.slots != NONE).sum(axis=1, dtype=np.int32)
        self._verify(decoding, counts, self._forest.gather(rows, picked.slots, counts))
        # As they were when it looked; the tree may have grown since.
        for session, chain in zip(decoding, told, strict=True):
            session.verifies = chain

    def _decide(self) -> tuple[list[ChainSession], Choice]:
        """Sessions that decode in the next step, and what it verifies of their guesses."""
        decoding = [session for session in self._rows if not session.reads]
        joining = [session for session in self._rows if session.reads]
        choice = self._drafts.choose(_forest_rows(decoding), _forest_rows(joining))
        self._drafts.describe(self.report)
        return decoding, choice

    def _verify(self, decoding: Sequence[ChainSession], counts: Ints, taken: Gathered) -> None:
        # vLLM may have asked before and verified nothing since.
        for session in decoding:
            self._forest.drop_kv(session.tree.row)
        self._forest.set_kv(Calls(_forest_rows(decoding).repeat(counts), taken.slots), taken.positions)
        tokens = iter(taken.tokens.tolist())
        for session, count in zip(decoding, counts.tolist(), strict=True):
            session.verifies = [*itertools.islice(tokens, count)]

    def show(self, board: SharedTrees) -> None:
        """Writes what sessions have at hand, as far as it has changed."""
        if not self.drafts:
            return
        decoding = [session for session in self._rows if session.max_chain and not session.reads]
        rows, links = _forest_rows(decoding), self._forest.links
        at, waits = links.standing(rows, 0), links.response_s(rows) / self._drafts.step_s
        terms = zip(at.prices.tolist(), at.shares.tolist(), waits.tolist(), strict=True)
        for session, (price, share, wait) in zip(decoding, terms, strict=True):
            tree = self._forest.arrays.trees[session.tree.row]
            version = int(tree["committed_len"]), int(tree["count"]), int(tree["offered"])
            if version == session.shown:
                continue
            session.shown = version
            nodes = self._forest.arrays.nodes[session.tree.row, : min(version[1], MOST_NODES)]
            board.write(
                session.number,
                BoardTree(
                    committed_len=version[0],
                    least=self._policy.price,
                    price=price,
                    child_share=share,
                    wait_share=wait,
                    weights=nodes["weight"],
                    token_ids=nodes["token"],
                    parents=nodes["parent"],
                ),
            )

    def take_outgoing(self) -> tuple[dict[str, list[ToDrafter]], dict[str, RemoteProtocolError]]:
        """Returns the messages for drafters, and the links to reset."""
        return self._tier.take()

    def take_report(self) -> StepReport:
        """Returns what was done since the last report."""
        report, self.report = self.report, StepReport()
        report.num_running = len(self._rows)
        self._tier.report_commits(report)
        self._drafts.show_lag(_forest_rows(self._rows), report)
        return report

    # Learning

    def learned(self) -> dict[str, Any]:
        """Learned tuning for a successor."""
        return {"policy": self._policy.learned(), "calibrations": self._calibrations.learned()}

    def resume(self, learned: Mapping[str, Any]) -> None:
        """Begins where a predecessor ended, or with what another one has learned.

        Raises:
            ConfigError, KeyError, TypeError, ValueError: It is not what such a scheduler learns.
        """
        self._policy.resume(learned["policy"])
        self._calibrations.resume(learned["calibrations"])

    def _calibrations_for(self, address: str) -> dict[str, int]:
        return dict.fromkeys(TIER_METHODS, self._calibrations.of(address))


def _forest_rows(sessions: Sequence[ChainSession]) -> Ints:
    return rows_of(session.tree.row for session in sessions)
