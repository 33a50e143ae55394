"""The controller against three oracles on the same load: `make bench NAME=controller`.

The planner's simulation of a verifier and its drafter serves 1, 2, 4, ... 64 sessions and then fewer again: the engines
that serve, with the step times of a profile and guesses whose true probabilities are known. At every load it runs with
the real controller, which keeps what it has learned at the loads before, and with

  clairvoyant   knows the target's tokens and the step times: verifies nothing in vain
  optimum       knows the true probabilities and the step times
  best fixed    the best fixed gamma of that load

Neither of the first two is slower than plain decoding, since each may do without drafters. The bench prints tokens/s,
the regret against the optimum, and the ratio to the best fixed gamma of each load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from loadtest.bench import bench_parser, report, show
from paceline.core.draft_policy import FixedGamma, Goodput, best_each
from paceline.core.goodput import best_prefix
from paceline.engine.target_session import TargetSession
from paceline.forest import NONE, ROOT, Bools, Ints, Picked, rows_of
from paceline.planning.engines import LAW, DrafterAtWork, Events, Request, VerifierAtWork
from paceline.planning.simulation import Outcome
from paceline.simulated.device import KEY
from paceline.simulated.guesses import DrawnGuesses
from paceline.simulated.profile import SHIPPED, Profile, read_profile
from paceline.simulated.text import contributions

LOADS = (1, 2, 4, 8, 16, 32, 64)
GAMMAS = (0, 1, 2, 3, 4, 6, 8, 12)
MOST_REGRET = 0.05
LEAST_OF_FIXED = 0.98
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 16, 160
# Share of the time at a load that is not counted: sessions begin together, and the controller meets a new load.
WARM_UP = 0.5
CONTROLLER, OPTIMUM, CLAIRVOYANT = "controller", "optimum", "clairvoyant"


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("controller", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="simulated time at each load (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of guesses and step times (default 0)")
    parser.add_argument("--profile", type=Path, default=SHIPPED / "demo.json", help="as of paceline plan")
    arguments = parser.parse_args()
    truth = DrawnGuesses(seed=arguments.seed)
    profile = replace(read_profile(arguments.profile), truth=truth)
    raise SystemExit(0 if compare(profile, truth, arguments.seconds) else 1)


def compare(profile: Profile, truth: DrawnGuesses, seconds: float) -> bool:
    """Prints the table; True when regret and the comparison with fixed gammas are within their limits."""
    loads = [*LOADS, *LOADS[-2::-1]]
    policies: dict[str, Goodput] = {
        CONTROLLER: Goodput(profile.target.starting_cost(), max_nodes=profile.most_nodes, most_on_loan=math.inf),
        OPTIMUM: Oracle(profile, truth, clairvoyant=False),
        CLAIRVOYANT: Oracle(profile, truth, clairvoyant=True),
        **{f"gamma {gamma}": FixedGamma(gamma=gamma) for gamma in GAMMAS},
    }
    rates: dict[str, list[float]] = {}
    for name, policy in tqdm(policies.items(), desc="simulating", unit="policy", leave=False):
        # Only the controller learns; what the others do at a load is the same on the way down.
        simulated = loads if name == CONTROLLER else LOADS
        found = [rate_of(profile, policy, load, seconds, truth.seed) for load in simulated]
        rates[name] = found if simulated is loads else [*found, *found[-2::-1]]
    for oracle in (OPTIMUM, CLAIRVOYANT):
        rates[oracle] = [max(pair) for pair in zip(rates[oracle], rates["gamma 0"], strict=True)]
    show({"policy": name, "tokens/s at": _by_load(loads, each)} for name, each in rates.items())
    best = [max(rates[f"gamma {gamma}"][index] for gamma in GAMMAS) for index in range(len(loads))]
    against_fixed = [ours / its for ours, its in zip(rates[CONTROLLER], best, strict=True)]
    regret = 1.0 - sum(rates[CONTROLLER]) / sum(rates[OPTIMUM])
    print(f"limits: regret {MOST_REGRET:.0%} of the optimum, {LEAST_OF_FIXED} of the best fixed gamma of each load")
    return report(
        "controller",
        regret=round(regret, 4),
        against_best_fixed=_by_load(loads, against_fixed, places=3),
        of_clairvoyant=round(sum(rates[CONTROLLER]) / sum(rates[CLAIRVOYANT]), 3),
        ok=regret < MOST_REGRET and min(against_fixed) >= LEAST_OF_FIXED,
    )


def _by_load(loads: Sequence[int], values: Sequence[float], places: int = 1) -> dict[str, float]:
    """The mean of both times at a load, by that load."""
    at = {load: [value for each, value in zip(loads, values, strict=True) if each == load] for load in LOADS}
    return {str(load): round(sum(each) / len(each), places) for load, each in at.items()}


class Oracle(Goodput):
    """Knows true probabilities and true step times; clairvoyant, the target's tokens as well. Drafters always work.

    Attributes:
        sessions: Returns the sessions that are served, by their rows in the forest.
    """

    price = 0.0
    drafts = True

    def __init__(self, profile: Profile, truth: DrawnGuesses, *, clairvoyant: bool) -> None:
        super().__init__(max_nodes=profile.most_nodes)
        self.sessions: Callable[[], dict[int, TargetSession]] = dict
        self._profile, self._truth, self._clairvoyant = profile, truth, clairvoyant

    def enter(self, num_sessions: int) -> bool:
        """Always drafts."""
        return num_sessions > 0

    def allocate(self, picked: Picked, *, answered: Bools | None = None, other_rows: int = 0) -> Ints:
        """Picks the nodes of highest goodput."""
        decoding = [each for each in self.sessions().values() if each.is_decoding]
        num_sessions = len(picked.slots)
        for index, session in enumerate(decoding):
            cap = session.tree.forest.links.caps(rows_of([session.tree.row]), picked.slots.shape[1])[0]
            ranked = self._ranked_of(session)[:cap]
            picked.slots[index], picked.survivals[index] = NONE, 0.0
            for rank, (survival, slot) in enumerate(ranked):
                picked.slots[index, rank], picked.survivals[index, rank] = slot, survival
        survivals = np.sort(picked.survivals[picked.survivals > 0.0])[::-1]
        rows = [num_sessions + other_rows + number for number in range(len(survivals) + 1)]
        seconds = [self._profile.target.step_s(each, num_sessions=num_sessions) for each in rows]
        best = best_prefix(num_sessions, survivals, seconds)
        return best_each(picked.survivals, best.count)

    def _ranked_of(self, session: TargetSession) -> Sequence[tuple[float, int]]:
        """The nodes of a session that are likeliest to be right, best first, so parents before children."""
        nodes = session.tree.forest.arrays.nodes[session.tree.row, : session.tree.num_nodes]
        rights = are_right(session.tokens, nodes["token"].tolist(), nodes["parent"].tolist())
        survivals = {ROOT: 1.0}
        for slot, (node, right) in enumerate(zip(nodes, rights, strict=True)):
            chance = float(right) if self._clairvoyant else self._truth.chance(float(node["confidences"][0]))
            survivals[slot] = survivals[int(node["parent"])] * chance
        del survivals[ROOT]
        return sorted(((survival, slot) for slot, survival in survivals.items()), key=lambda entry: -entry[0])

    def observe(self, *, roots: int, guesses: int, tokens: int, seconds: float, other_rows: int = 0) -> None:
        """Learns nothing: it knows everything."""


def are_right(tokens: Sequence[int], guesses: Sequence[int], parents: Sequence[int]) -> list[bool]:
    """Whether the nodes of a tree are what follows in the text that their parents end.

    Args:
        tokens: Committed.
        guesses: Of the nodes.
        parents: Slots of theirs, before their own.
    """
    start = contributions(np.asarray(tokens), np.arange(len(tokens)), KEY).sum(dtype=np.uint64)
    digests, depths = {ROOT: int(start)}, {ROOT: 0}
    for slot, parent in enumerate(parents):
        depths[slot] = depths[parent] + 1
    places = np.array([len(tokens) + depths[slot] - 1 for slot in range(len(parents))], np.int64)
    added = contributions(np.asarray(guesses, np.int64), places, KEY)
    for slot, parent in enumerate(parents):
        digests[slot] = (digests[parent] + int(added[slot])) % 2**64
    truths = LAW.next_tokens(np.array([digests[parent] for parent in parents], np.uint64))
    return [guess == truth for guess, truth in zip(guesses, truths.tolist(), strict=True)]


def rate_of(profile: Profile, policy: Goodput, load: int, seconds: float, seed: int) -> float:
    """Tokens/s of a verifier under a policy while this many sessions each begin anew when they end."""
    events, requests = Events(), list[Request]()

    def ask() -> None:
        request = Request(
            number=len(requests),
            at_s=events.now_s,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            num_output_tokens=NUM_OUTPUT_TOKENS,
        )
        requests.append(request)
        verifier.submit(request)

    def ended(request: Request) -> None:
        del request
        events.after(0.0, ask)

    def sessions() -> dict[int, TargetSession]:
        return {session.tree.row: session for session in verifier.engine.scheduler.running}

    drafter = DrafterAtWork("drafter", profile, events, seed)
    verifier = VerifierAtWork(
        profile, events, colocated=False, drafters=[drafter], on_end=ended, policy=policy, seed=seed
    )
    if isinstance(policy, Oracle):
        policy.sessions = sessions
    for _ in range(load):
        ask()
    events.run(seconds)
    return Outcome(requests=requests, door_s=0.0, since_s=WARM_UP * seconds, until_s=seconds).tokens_per_s
