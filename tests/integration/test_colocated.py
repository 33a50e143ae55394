"""A draft model, or a head, inside the verifier: the same engines, the same tokens, and no drafter anywhere."""

from __future__ import annotations

import random

import pytest

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Cancel, Submit, TargetLimits
from paceline.engine.draft_scheduler import DraftLimits
from paceline.engine.drafter import DraftEngine
from paceline.engine.eagle3 import draft_identity, load_draft, load_fusion
from paceline.engine.loading import load_decoder, model_identity
from paceline.engine.loop import run_sync
from paceline.engine.target import LOCAL, TargetEngine
from tests.support.checkpoints import save_pair
from tests.support.eagle import save_eagle3
from tests.support.engines import Clock
from tests.support.steps import steps_of

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=32, temperature=0.8, seed=4, frequency_penalty=0.2, ignore_eos=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colocated")
    target, drafter = save_pair(folder)
    return target, {"draft_model": drafter, "eagle3": save_eagle3(folder / "head", target, layer_ids=(0, 0, 0))}


# What a step of the target takes on the test's clock: as much as many steps of a drafter.
STEP_S = 0.1


def slowed(decoder, clock):
    """The target, whose steps take their time."""
    launch = decoder.launch

    def slow_launch(*arguments):
        clock.now_s += STEP_S
        return launch(*arguments)

    decoder.launch = slow_launch
    return decoder


class Colocated:
    """The engine, and what it has generated."""

    def __init__(self, target, draft, policy):
        clock = Clock()
        decoder, head = (load_decoder(target, "float32", "cpu", 1), load_draft(draft, target, "float32", "cpu", 1))
        if head.feature_width:
            decoder.keep_states(load_fusion(draft, decoder))
        identity = model_identity(target)
        self.target = TargetEngine(
            decoder=slowed(decoder, clock),
            identity=identity,
            num_blocks=256,
            limits=TargetLimits(max_num_seqs=8, max_num_batched_tokens=64),
            policy=policy,
            clock=clock,
        )
        self.draft = DraftEngine(
            decoder=head,
            identity=draft_identity(draft, target, dtype="float32", device="cpu"),
            num_blocks=256,
            limits=DraftLimits(),
            clock=clock,
        )
        self.draft.warm_up()
        self.engine = self.target
        self.engine.draft_inside(self.draft, wants_states=bool(head.feature_width))
        self.token_ids: dict[int, list[int]] = {}
        self.results = {}

    def submit(self, number, prompt, sampling, speculation):
        self.token_ids[number] = []
        request = GenerateRequest(
            session_id=f"s{number}",
            epoch=1,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            speculation=speculation,
        )
        self.engine.handle(Submit(request=request, number=number, drafter_address=LOCAL))

    def run(self):
        while self.engine.has_work():
            output = run_sync(self.engine.step())
            assert not output.to_drafters
            for number, committed in steps_of(output.commit):
                self.token_ids[number] += committed.token_ids
                self.results[number] = committed.result
        return [self.token_ids[number] for number in sorted(self.token_ids)]


def run(folders, kind, sampling, policy, speculation):
    target, drafts = folders
    colocated = Colocated(target, drafts[kind], policy)
    rng = random.Random(5)
    for number in range(1, 5):
        prompt = [rng.randrange(250) for _ in range(rng.randint(2, 80))]
        colocated.submit(number, prompt, SAMPLINGS[sampling], speculation)
    return colocated.run(), colocated


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_the_tokens_are_those_of_plain_decoding(folders, kind, sampling):
    plain, _ = run(folders, kind, sampling, FixedGamma(gamma=4), SpeculationParams(enabled=False))
    for policy in (FixedGamma(gamma=4), Goodput()):
        found, colocated = run(folders, kind, sampling, policy, SpeculationParams())
        assert found == plain
        verified = [result.speculation.num_draft_tokens for result in colocated.results.values()]
        assert sum(verified) > 0
        if isinstance(policy, FixedGamma):
            assert min(verified) > 20, "every session was drafted for"
    assert colocated.draft.num_sessions == 0


def test_a_cancelled_session_leaves_nothing_behind(folders):
    target, drafts = folders
    colocated = Colocated(target, drafts["eagle3"], FixedGamma(gamma=4))
    colocated.submit(1, [1, 2, 3, 4], SAMPLINGS["greedy"], SpeculationParams())
    for _ in range(5):
        run_sync(colocated.engine.step())
    assert colocated.draft.num_sessions == 1
    colocated.engine.handle(Cancel(number=1))
    colocated.run()
    assert colocated.draft.num_sessions == 0
    assert colocated.draft.pool.num_used == 0
