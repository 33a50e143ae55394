"""Early exit drafts what the target cut short would say, and leaves nothing behind but guesses."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest
import torch

from paceline.core.pages import BlockPool, SessionPages, SlotPool
from paceline.core.params import SamplingParams
from paceline.core.tree import DraftTree
from paceline.drafting.early_exit import EarlyExitSource
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.packing import BatchBuilder, PrefixRows
from paceline.engine.sampler import RowSampler
from paceline.engine.source_interface import Turn
from tests.support.trees import new_tree, nodes_of, seen
from tests.unit.engine.tiny_models import PROMPT, VOCAB

NUM_BLOCKS, SCRATCH_BLOCKS = 8, 2
OTHER_PROMPT = [*PROMPT[20:37], 4]


@dataclass
class Session:
    """A greedy session of which all tokens but the last are computed."""

    tokens: list[int]
    pages: SessionPages
    greedy: bool = True
    prompt_len: int = 1

    def rank(self, logits, position, count, path):
        return RowSampler(SamplingParams(max_tokens=1, temperature=0.0), VOCAB, (), ()).rank(
            logits, position, count, path
        )


@dataclass
class Bench:
    """A decoder with pages and scratch slots."""

    decoder: Decoder
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    scratch: SlotPool = field(default_factory=lambda: SlotPool(NUM_BLOCKS, SCRATCH_BLOCKS))

    def __post_init__(self) -> None:
        self.cache: KVCache = self.decoder.new_cache(NUM_BLOCKS + SCRATCH_BLOCKS)

    def session(self, tokens) -> Session:
        pages = SessionPages(tokens, self.pool)
        assert pages.reserve(len(tokens) - 1)
        builder = BatchBuilder()
        builder.add_prefixes([PrefixRows(pages, 0, len(tokens) - 1)])
        self.decoder.forward(builder.build(), self.cache)
        pages.mark_computed(len(tokens) - 1)
        return Session(tokens, pages)

    def grow(self, source, sessions, *, limit=8, least=0.0) -> tuple[list[DraftTree], list[list[float]]]:
        source.attach(self.cache, self.scratch)
        trees = [new_tree(len(session.tokens)) for session in sessions]
        turns = [
            Turn(follower=source.follow(session), tree=tree, limit=limit, least=least)
            for session, tree in zip(sessions, trees, strict=True)
        ]
        source.grow(turns)
        return trees, [[node.survival for node in nodes_of(tree)] for tree in trees]


def likeliest_path(tree) -> list[int]:
    node = seen(tree)
    while node.children:
        node = max(node.children.values(), key=lambda child: child.survival)
    return node.path()


def truncated_greedy(model, layers, tokens, count) -> list[int]:
    """What transformers says with these layers alone from the last token on; KV before it is the whole model's."""
    whole = copy.deepcopy(model.oracle)
    cache = whole(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
    cut = copy.deepcopy(model.oracle)
    cut.model.layers = torch.nn.ModuleList([cut.model.layers[index] for index in layers])
    said, token = [], tokens[-1]
    with torch.no_grad():
        for _ in range(count):
            token = int(cut(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].argmax())
            said.append(token)
    return said


@pytest.mark.parametrize("layers", [(0,), (0, 1), (0, 2), (0, 1, 2)])
def test_a_chain_is_what_the_target_of_these_layers_says(tiny, layers):
    model = tiny("llama")
    bench = Bench(model.load())
    sessions = [bench.session(list(PROMPT)), bench.session(list(OTHER_PROMPT))]
    source = EarlyExitSource(bench.decoder, layers, cost=0.0, width=1)
    trees, survivals = bench.grow(source, sessions)
    for session, tree, chances in zip(sessions, trees, survivals, strict=True):
        assert likeliest_path(tree) == truncated_greedy(model, layers, session.tokens, 6)
        assert len(chances) == 6
        assert chances == sorted(chances, reverse=True)


def test_siblings_and_their_children_see_their_own_path(tiny):
    model = tiny("qwen3")
    bench = Bench(model.load())
    session = bench.session(list(PROMPT))
    (tree,), _ = bench.grow(EarlyExitSource(bench.decoder, (0, 1), cost=0.0), [session], limit=18)
    expanded = [node for node in nodes_of(tree) if node.children]
    assert any(len(node.path()) == 1 for node in expanded), "some child of the root has children"
    for node in expanded:
        path = node.path()
        best = max(node.children.values(), key=lambda child: child.survival).token_id
        builder = BatchBuilder()
        chain = SessionPages([*session.tokens, *path], bench.pool)
        assert chain.reserve(len(chain.tokens))
        builder.add_prefixes([PrefixRows(chain, 0, len(session.tokens) - 1)])
        bench.decoder.forward(builder.build(), bench.cache)
        builder = BatchBuilder()
        builder.add_prefixes([PrefixRows(chain, len(session.tokens) - 1, len(chain.tokens), wants_logits=True)])
        assert int(bench.decoder.forward(builder.build(), bench.cache, (0, 1))[0].argmax()) == best
        chain.release()


def test_nothing_is_left_behind_but_guesses(tiny):
    bench = Bench(tiny("llama").load())
    sessions = [bench.session(list(PROMPT)), bench.session(list(OTHER_PROMPT))]
    keys, computed = bench.cache.keys.clone(), [session.pages.num_computed for session in sessions]
    bench.grow(EarlyExitSource(bench.decoder, (0,), cost=0.0), sessions)
    assert bench.scratch.num_used == 0
    assert [session.pages.num_computed for session in sessions] == computed
    assert torch.equal(bench.cache.keys[1:], keys[1:])
    for session in sessions:
        blocks, last = session.pages.blocks, len(session.tokens) - 1
        for position in range(last):
            block, offset = blocks[position // 16], position % 16
            assert torch.equal(bench.cache.keys[0, block, :, :, offset], keys[0, block, :, :, offset])


def test_without_memory_for_a_pass_no_slot_is_left_behind(tiny, monkeypatch):
    bench = Bench(tiny("llama").load())
    session = bench.session(list(PROMPT))
    forward = bench.decoder.forward
    passes = iter((forward, forward, Mock(side_effect=MemoryError("no room"))))
    monkeypatch.setattr(bench.decoder, "forward", lambda *arguments: next(passes)(*arguments))
    with pytest.raises(MemoryError):
        bench.grow(EarlyExitSource(bench.decoder, (0,), cost=0.0), [session])
    assert bench.scratch.num_used == 0


def test_without_a_page_for_the_root_there_are_no_guesses(tiny):
    bench = Bench(tiny("llama").load())
    full, fits = bench.session(list(PROMPT[:33])), bench.session(list(PROMPT[:20]))
    assert bench.pool.allocate(NUM_BLOCKS - bench.pool.num_used) is not None
    trees, survivals = bench.grow(EarlyExitSource(bench.decoder, (0,), cost=0.0), [full, fits])
    assert trees[0].num_nodes == 0
    assert survivals[0] == []
    assert trees[1].num_nodes > 0


def test_few_scratch_slots_mean_fewer_guesses(tiny):
    bench = Bench(tiny("llama").load())
    taken = [bench.scratch.take() for _ in range(bench.scratch.num_slots - 2)]
    session = bench.session(list(PROMPT))
    (tree,), _ = bench.grow(EarlyExitSource(bench.decoder, (0,), cost=0.0, width=1), [session])
    assert tree.num_nodes == 3
    assert bench.scratch.num_used == len(taken)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_guesses_than_may_be_verified(tiny, limit):
    bench = Bench(tiny("llama").load())
    session = bench.session(list(PROMPT))
    (tree,), (survivals,) = bench.grow(EarlyExitSource(bench.decoder, (0,), cost=0.0), [session], limit=limit)
    assert tree.num_nodes == len(survivals) == limit


def test_dear_passes_end_after_the_first(tiny):
    bench = Bench(tiny("llama").load())
    session = bench.session(list(PROMPT))
    (tree,), _ = bench.grow(EarlyExitSource(bench.decoder, (0,), cost=1.0), [session])
    assert max(len(node.path()) for node in nodes_of(tree)) == 1


def test_a_session_with_more_to_compute_than_its_root_gets_none(tiny):
    bench = Bench(tiny("llama").load())
    session = bench.session(list(PROMPT))
    session.tokens.append(3)
    (tree,), (survivals,) = bench.grow(EarlyExitSource(bench.decoder, (0,), cost=0.0), [session])
    assert (tree.num_nodes, survivals) == (0, [])


def test_a_pass_costs_what_it_reads(tiny):
    decoder = tiny("llama").load()
    shares = [decoder.share(range(count)) for count in range(4)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[1]
    assert shares[3] == pytest.approx(1.0)


@pytest.mark.parametrize("is_right", [False, True])
def test_a_target_that_was_not_trained_for_it_is_named_once(tiny, caplog, is_right):
    bench = Bench(tiny("llama").load())
    source = EarlyExitSource(bench.decoder, (0,), cost=0.0)
    source.attach(bench.cache, bench.scratch)
    session = bench.session(list(PROMPT))
    followers = [source.follow(session) for _ in range(60)]
    for _ in range(3):
        guess = grow_one(source, followers, session)
        session.tokens.append(guess if is_right else (guess + 1) % VOCAB)
        grow_one(source, followers, session)
        session.tokens.pop()
    warnings = [record.getMessage() for record in caplog.records]
    assert ["guessed 0 of 100 tokens right with 1 layers" in each for each in warnings] == ([] if is_right else [True])


def grow_one(source, followers, session) -> int | None:
    """Returns the best first guess of all, which follow the same session."""
    trees = [new_tree(len(session.tokens)) for _ in followers]
    source.grow(
        [Turn(follower=each, tree=tree, limit=1, least=0.0) for each, tree in zip(followers, trees, strict=True)]
    )
    return next((path[0] for path in map(likeliest_path, trees) if path), None)
