"""EAGLE-3 over the in-memory link: what the head drafts from arrives, what it drafts is what the paper says, and the
tokens are those of plain decoding whatever happens to the states on their way."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from paceline.core.draft_policy import FixedGamma
from paceline.core.errors import RemoteProtocolError
from paceline.core.features import FeatureBuffer
from paceline.core.messages import Commit, CommittedStates, LaggingSession, OpenSession
from paceline.core.params import EAGLE3, SamplingParams, SpeculationParams
from paceline.core.target_events import Paired
from paceline.engine.draft_scheduler import VerifierMessages
from paceline.engine.loop import run_sync
from tests.support.checkpoints import save_pair
from tests.support.eagle import eagle_forward, save_eagle3
from tests.support.engines import EnginePair
from tests.support.guesses import to_commits

# Not the last one: transformers hands that out normalised.
LAYERS = (0, 0, 0)
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(
        max_tokens=40, temperature=0.9, top_p=0.95, seed=11, presence_penalty=0.3, ignore_eos=True
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    target, drafter = save_pair(folder)
    return target, drafter, save_eagle3(folder / "head", target, layer_ids=LAYERS, draft_vocab=200)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    # The first one is so short that nothing can be drafted after it.
    return [
        [rng.randrange(250) for _ in range(length)] for length in (1, 2, *(rng.randint(3, 90) for _ in range(count)))
    ]


def make(folders, **options) -> EnginePair:
    target, drafter, head = folders
    return EnginePair(target, drafter, eagle3_model=head, policy=FixedGamma(gamma=4), **options)


def submit_all(pair: EnginePair, sampling: SamplingParams, **options) -> None:
    for index, prompt in enumerate(prompts(8)):
        pair.submit(f"s{index}", prompt, sampling, **options)


def texts(pair: EnginePair) -> list[list[int]]:
    return [generated.token_ids for generated in pair.sessions.values()]


@pytest.fixture(scope="module")
def plain(folders):
    found = {}
    for name, sampling in SAMPLINGS.items():
        pair = make(folders)
        submit_all(pair, sampling, speculation=SpeculationParams(enabled=False))
        pair.run()
        found[name] = texts(pair)
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
def test_the_same_seed_gives_the_same_tokens(folders, plain, sampling, width):
    pair = make(folders, width=width)
    submit_all(pair, SAMPLINGS[sampling])
    pair.run()
    assert texts(pair) == plain[sampling]
    verified = [each.result.speculation.num_draft_tokens for each in pair.sessions.values()]
    assert min(verified) > 10, "every session was drafted for"


def test_a_chain_is_what_the_head_says_from_the_targets_features_and_its_own(folders):
    target, _, head = folders
    pair = make(folders, width=1)
    prompt = prompts(8)[5]
    pair.submit("s", prompt, SamplingParams(max_tokens=12, temperature=0.0))
    checked = 0
    while pair.target.has_work():
        pair.round(draft_steps=6)
        session = next(iter(pair.draft.scheduler._sessions.values()), None)
        if session is None or session.pages.num_missing:
            continue
        forest = pair.draft.scheduler.trees.forest
        named = forest.arrays.nodes["id"][session.row, : forest.count(session.row)] > 0
        chain = forest.path(session.row, int(named.sum()) - 1)
        assert chain[:4] == expected_chain(target, head, session.tokens, 4)
        checked += 1
    assert checked > 8


def expected_chain(target, head, tokens, length) -> list[int]:
    """Greedy drafts after committed tokens; features are rounded as the wire rounds them."""
    oracle = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        streams = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    tensors = load_file(head / "model.safetensors")
    fused = torch.cat([streams[layer + 1][0] for layer in LAYERS], dim=-1) @ tensors["fc.weight"].T
    features = fused[:-1].to(torch.bfloat16).float()
    known, embedding = torch.arange(200) + tensors["d2t"], oracle.get_input_embeddings().weight.detach()
    drafted: list[int] = []
    for own in range(length):
        logits, _ = eagle_forward(head, embedding, [*tokens[1:], *drafted], features, rope_theta=10000.0, num_own=own)
        drafted.append(int(known[logits[-1].argmax()]))
    return drafted


def test_states_of_a_cached_prefix_come_from_the_cache(folders, plain):
    pair = make(folders)
    prompt = prompts(8)[4] * 2
    counts = []
    for name in ("first", "second"):
        pair.submit(name, prompt, SAMPLINGS["greedy"])
        pair.run()
        counts.append(pair.sessions[name].result.speculation)
    first, second = pair.sessions["first"], pair.sessions["second"]
    assert second.result.num_cached_tokens > 0
    assert second.token_ids == first.token_ids
    assert counts[1].num_accepted_draft_tokens == counts[0].num_accepted_draft_tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafter_that_dies_and_returns_is_told_all_states_anew(folders, plain, sampling):
    pair = make(folders)
    submit_all(pair, SAMPLINGS[sampling])
    for number in range(12):
        if number == 4:
            pair.kill_drafter()
        if number == 7:
            pair.start_drafter()
        pair.round()
    assert all(
        session.features.start > 0 for session in pair.draft.scheduler._sessions.values() if session.pages.num_computed
    )
    trees = pair.draft.scheduler.trees
    assert any(trees.forest.count(session.row) for session in pair.draft.scheduler._sessions.values())
    pair.run()
    assert texts(pair) == plain[sampling]


def test_preempted_sessions_hand_out_their_states_again(folders, plain):
    pair = make(folders, num_blocks=24)
    submit_all(pair, SAMPLINGS["greedy"])
    pair.run()
    assert pair.num_preempted > 0
    assert texts(pair) == plain["greedy"]


def test_guesses_are_known_by_the_name_of_their_source(folders):
    pair = make(folders)
    pair.submit("s", prompts(8)[5], SAMPLINGS["greedy"])
    for _ in range(6):
        pair.round()
    assert pair.target.patience_s() >= 0.0, "guesses that wait are in the trees now"
    (session,) = pair.target.scheduler.running
    assert set(session.tree.forest.unverified_sources(session.tree.row)) == {EAGLE3}
    pair.target.handle(Paired(number=1, address=""))
    pair.run()


def test_features_of_no_use_are_not_asked_for_again_and_again(folders):
    engine = make(folders).draft
    opened = OpenSession(
        session_id="s",
        epoch=1,
        number=1,
        token_ids=tuple(range(10)),
        prompt_len=10,
        sampling=SamplingParams(max_tokens=40, temperature=0.0),
        price=0.0,
        room=8,
    )
    engine.handle(VerifierMessages(link=1, messages=[opened, features(0, torch.zeros(9, 64))]))
    said = []
    for length in range(10, 14):
        while engine.has_work():
            said += run_sync(engine.step()).to_verifiers.get(1, [])
        commit = to_commits(Commit(1, length, [7], price=0.0, room=8))
        worthless = features(length - 1, torch.full((1, 64), torch.nan))
        engine.handle(VerifierMessages(link=1, messages=[worthless, commit]))
    said += run_sync(engine.step()).to_verifiers.get(1, [])
    assert said, "the first features were of use"
    assert not [message for message in said if isinstance(message, LaggingSession)]


def features(start, values) -> CommittedStates:
    encoded = values.bfloat16().view(torch.uint8).numpy().tobytes()
    return CommittedStates(number=1, start=start, width=values.shape[1], values=encoded)


def states(start, count, width=4) -> CommittedStates:
    values = (torch.arange(start, start + count)[:, None] * torch.ones(width)).to(torch.bfloat16)
    return CommittedStates(number=1, start=start, width=width, values=values.view(torch.uint8).numpy().tobytes())


def test_features_come_in_order_once_and_go_when_used():
    buffer = FeatureBuffer(4, most=8)
    buffer.add(states(0, 5))
    buffer.add(states(3, 4))
    assert (buffer.start, buffer.stop) == (0, 7)
    buffer.drop_before(2)
    assert buffer.rows(2, 7)[:, 0].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    buffer.add(states(0, 4))
    assert buffer.stop == 7
    with pytest.raises(RemoteProtocolError, match=r"CommittedStates.start: must be at most 7, got 9"):
        buffer.add(states(9, 1))
    with pytest.raises(RemoteProtocolError, match=r"CommittedStates.width: must be 4, got 3"):
        buffer.add(states(7, 1, width=3))
    with pytest.raises(RemoteProtocolError, match="a session has at most 8 positions"):
        buffer.add(states(7, 2))
