"""Target and draft engines on real (tiny) models: the same seed gives the same tokens, whatever happens around it."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.messages import FinishReason
from paceline.core.params import (
    DRAFT_MODEL,
    LAYER_SKIP,
    MEDUSA,
    NGRAM,
    SamplingParams,
    SpeculationParams,
)
from paceline.core.step_time import StepCost
from paceline.forest import Forest
from tests.support.engines import DRAFTER, EnginePair, prompts
from tests.support.heads import random_medusa, save_medusa
from tests.support.trees import nodes

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=11),
    "everything": SamplingParams(
        max_tokens=40, temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, seed=5, repetition_penalty=1.1,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((3, 1.5), (9, -4.0)), min_tokens=20,
    ),
}  # fmt: skip


def texts(pair: EnginePair, sampling: SamplingParams, count: int, **kwargs) -> list[list[int]]:
    """Runs `count` sessions at once and returns their tokens."""
    for index, prompt in enumerate(prompts(count)):
        pair.submit(f"s{index}", prompt, sampling, **kwargs)
    pair.run()
    return [pair.sessions[f"s{index}"].token_ids for index in range(count)]


@pytest.fixture(scope="module")
def plain(tiny_pair):
    """Each session alone, without drafts."""
    found = {}
    for name, sampling in SAMPLINGS.items():
        pair = EnginePair(*tiny_pair)
        rows = []
        for index, prompt in enumerate(prompts(16)):
            pair.submit(f"s{index}", prompt, sampling, SpeculationParams(enabled=False))
            pair.run()
            rows.append(pair.sessions[f"s{index}"].token_ids)
        found[name] = rows
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_gamma_tree_shape_and_batch_leave_the_tokens_alone(tiny_pair, plain, sampling, width, gamma):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=gamma), width=width)
    assert texts(pair, SAMPLINGS[sampling], 16) == plain[sampling]
    if gamma:
        accepted = sum(s.result.speculation.num_accepted_draft_tokens for s in pair.sessions.values())
        assert accepted > 100, "the test would prove little without accepted drafts"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_goodput_policy_leaves_the_tokens_alone(tiny_pair, plain, sampling):
    assert texts(EnginePair(*tiny_pair, policy=Goodput()), SAMPLINGS[sampling], 16) == plain[sampling]


@pytest.fixture(scope="module")
def random_heads(tmp_path_factory):
    """Medusa heads that know nothing of the target."""
    return save_medusa(tmp_path_factory.mktemp("heads"), random_medusa(), num_heads=3, num_blocks=1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_prediction_makes_a_text_faster_and_leaves_its_tokens_alone(tiny_pair, plain, sampling):
    """Its own text as the prediction, one with a change in the midst, and another's."""
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4), methods=(NGRAM,))
    pair.kill_drafter()
    [prompt], text = prompts(1), plain[sampling][0]
    predictions = {"own": text, "changed": [*text[:10], 3, *text[11:]], "another's": plain[sampling][1]}
    steps = {}
    for name, predicted in predictions.items():
        speculation = SpeculationParams(predicted_token_ids=tuple(predicted))
        pair.submit(name, prompt, SAMPLINGS[sampling], speculation)
        pair.run()
        assert pair.sessions[name].token_ids == text
        steps[name] = pair.sessions[name].result.speculation.num_steps
    assert steps["own"] <= steps["changed"] < steps["another's"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("methods", [(MEDUSA,), (LAYER_SKIP,), (NGRAM, MEDUSA, LAYER_SKIP)], ids="+".join)
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "beside drafters"])
def test_heads_and_layers_leave_the_tokens_alone(tiny_pair, plain, random_heads, sampling, methods, drafter):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=6), methods=methods, medusa_model=random_heads)
    if not drafter:
        pair.kill_drafter()
    assert texts(pair, SAMPLINGS[sampling], 16) == plain[sampling]
    drafted = sum(s.result.speculation.num_draft_tokens for s in pair.sessions.values())
    assert drafted > 500, "the test would prove little without drafts"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafter_killed_in_mid_stream_and_restarted_costs_nothing_but_speed(tiny_pair, plain, sampling):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4))
    for index, prompt in enumerate(prompts(16)):
        pair.submit(f"s{index}", prompt, SAMPLINGS[sampling])
    for _ in range(4):
        pair.round()
    pair.kill_drafter()
    for _ in range(4):
        pair.round()
    pair.start_drafter()
    pair.run()
    assert [pair.sessions[f"s{index}"].token_ids for index in range(16)] == plain[sampling]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_session_taken_over_with_its_tokens_continues_the_same_text(tiny_pair, plain, sampling):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4))
    unfinished = {f"s{index}": row for index, row in enumerate(plain[sampling]) if len(row) > 7}
    assert len(unfinished) > 8
    for index, prompt in enumerate(prompts(16)):
        if f"s{index}" in unfinished:
            pair.submit(f"s{index}", prompt, SAMPLINGS[sampling], committed=unfinished[f"s{index}"][:7])
    pair.run()
    assert {name: session.token_ids for name, session in pair.sessions.items()} == {
        name: row[7:] for name, row in unfinished.items()
    }


@pytest.mark.parametrize("methods", [(), (NGRAM, MEDUSA, LAYER_SKIP)], ids=["drafter", "all sources"])
def test_few_pages_mean_preemption_and_the_same_tokens(tiny_pair, plain, random_heads, methods):
    options = {"methods": methods, "medusa_model": random_heads}
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4), num_blocks=20, **options)
    for index, prompt in enumerate(prompts(16)):
        pair.submit(f"s{index}", prompt, SAMPLINGS["sampled"])
    pair.run()
    assert pair.num_preempted > 0, "the pool must be too small, or this proves nothing"
    assert [pair.sessions[f"s{index}"].token_ids for index in range(16)] == plain["sampled"]
    assert pair.target.pool.num_used == 0


def test_chunked_prefill_and_the_prefix_cache_leave_the_tokens_alone(tiny_pair):
    prompt = [index % 250 for index in range(200)]
    sampling = SamplingParams(max_tokens=24, temperature=0.9, seed=3)
    whole = EnginePair(*tiny_pair, max_num_batched_tokens=256)
    whole.submit("a", prompt, sampling)
    whole.run()
    chunked = EnginePair(*tiny_pair, max_num_seqs=16, max_num_batched_tokens=16)
    for name in ("a", "b"):
        chunked.submit(name, prompt, sampling)
        chunked.run()
    assert chunked.sessions["a"].token_ids == whole.sessions["a"].token_ids
    assert chunked.sessions["b"].token_ids == whole.sessions["a"].token_ids
    assert chunked.sessions["a"].result.num_cached_tokens == 0
    assert chunked.sessions["b"].result.num_cached_tokens == 192


def test_a_prompt_cut_by_time_leaves_the_tokens_and_their_log_probabilities_alone(tiny_pair):
    prompt = [7 * index % 250 for index in range(300)]
    sampling = SamplingParams(max_tokens=24, temperature=0.9, seed=3, logprobs=2)
    found = []
    for row_s in (1e-6, 0.01, 0.05):
        pair = EnginePair(*tiny_pair, max_num_batched_tokens=512)
        pair.target.scheduler.prompt_rows.start_from(StepCost(rows=(1, 4), seconds=(row_s, 4 * row_s)))
        launch = pair.target._decoder.launch

        def slow(batch, cache, wanted, *, clock=pair.clock, launch=launch, row_s=row_s):
            clock.now_s += row_s * batch.num_rows
            return launch(batch, cache, wanted)

        pair.target._decoder.launch = slow
        for name, text in (("beside", prompt[:9]), ("a", prompt), ("b", prompt[40:])):
            pair.submit(name, text, sampling, salt=name)
        pair.run()
        sessions = pair.sessions.values()
        texts = [[entry for message in each.messages for entry in message.logprobs] for each in sessions]
        found.append((sum(report.num_prefill_rows > 0 for report in pair.reports), texts))
    assert found[0][0] < found[1][0] < found[2][0], "the slower a row, the more steps"
    assert found[0][1] == found[1][1] == found[2][1]


def test_a_verifier_that_its_last_client_leaves_reports_that_it_is_idle(tiny_pair):
    pair = EnginePair(*tiny_pair)
    pair.kill_drafter()
    pair.submit("s", prompts(1)[0], SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    pair.round()
    pair.cancel("s")
    pair.run()
    assert [(report.num_running, report.levels["vllm:kv_cache_usage_perc"] > 0.0) for report in pair.reports] == [
        (1, True),
        (0, False),
    ]


def test_every_node_of_a_tree_has_one_fate(tiny_pair, monkeypatch):
    added: Counter[str] = Counter()
    add, merge = Forest.add, Forest.merge

    def added_one(forest, row, parent, token, confidence, source):
        before = forest.count(row)
        slot = add(forest, row, parent, token, confidence, source)
        added[forest.sources[source]] += forest.count(row) - before
        return slot

    def merged_in(forest, source, *columns):
        merged = merge(forest, source, *columns)
        added[forest.sources[source]] += int(merged.counts[:, 0].sum())
        return merged

    # Kernels are warmed up with a forest of their own before anything counts.
    pair = EnginePair(*tiny_pair, methods=(DRAFT_MODEL, NGRAM), policy=FixedGamma(gamma=3))
    monkeypatch.setattr(Forest, "add", added_one)
    monkeypatch.setattr(Forest, "merge", merged_in)
    texts(pair, SAMPLINGS["greedy"], 16)
    fates: Counter[str] = Counter()
    for report in pair.reports:
        fates.update(nodes(report, "accepted", "rejected", "unverified"))
    assert fates == added
    assert min(added[DRAFT_MODEL], added[NGRAM]) > 0


def test_tokens_are_counted_by_drafter_and_its_time_by_verifier(tiny_pair):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=3))
    device_s, step = [], pair.draft.step

    async def watched(*arguments):
        output = await step(*arguments)
        device_s.append((output.device_s, output.report))
        return output

    pair.draft.step = watched
    pair.submit("drafted", prompts(1)[0], SAMPLINGS["greedy"])
    pair.run()
    pair.kill_drafter()
    pair.submit("plain", prompts(1)[0], SAMPLINGS["greedy"])
    pair.run()
    counts = Counter()
    for report in pair.reports:
        counts.update(report.counts)
    mine, nobody = ("", DRAFTER), ("", "")
    num_tokens = {name: len(session.token_ids) for name, session in pair.sessions.items()}
    assert counts["paceline:drafter_committed_tokens", *mine] == num_tokens["drafted"]
    assert counts["paceline:drafter_committed_tokens", *nobody] == num_tokens["plain"]
    judged = {fate: counts["paceline:draft_nodes", DRAFT_MODEL, fate] for fate in ("accepted", "rejected")}
    assert counts["paceline:drafter_accepted_tokens", *mine] == judged["accepted"]
    assert counts["paceline:drafter_verified_tokens", *mine] == sum(judged.values()) > 0
    assert all(set(each) == ({1} if report.num_rows else set()) for each, report in device_s)


def test_speculation_off_says_nothing_to_the_drafter(tiny_pair):
    pair = EnginePair(*tiny_pair)
    pair.submit("s", prompts(1)[0], SAMPLINGS["greedy"], SpeculationParams(enabled=False))
    pair.run()
    assert pair.draft.num_sessions == 0
    assert pair.sessions["s"].result.speculation.num_draft_tokens == 0


def test_steps_of_long_prompts_take_the_cpus_of_drafters_at_work(tiny_pair):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=2))
    for name in ("first", "second"):
        pair.submit(name, prompts(1)[0] * 4, SAMPLINGS["greedy"])
        pair.round()
        pair.round()
    pair.run()
    rows = [(report.num_prefill_rows, report.num_rows) for report in pair.reports if report.num_rows]
    assert sum(0 < prefill < all_rows for prefill, all_rows in rows) == 1, "the second prompt came into decoding"
    assert pair.drafters_worked == [prefill == 0 for prefill, _ in rows]


def test_max_draft_tokens_caps_every_step(tiny_pair):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=8))
    pair.submit("s", prompts(1)[0], SAMPLINGS["greedy"], SpeculationParams(max_draft_tokens=2))
    pair.run()
    record = pair.sessions["s"].result.speculation
    assert 0 < record.num_draft_tokens <= 2 * record.num_spec_steps


@pytest.mark.parametrize("gamma", [0, 6])
def test_a_stop_token_inside_an_accepted_run_ends_the_text_there(tiny_pair, plain, gamma):
    text = plain["greedy"][0]
    stop = text[9]
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=gamma))
    pair.submit("s", prompts(1)[0], SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(stop,)))
    pair.run()
    assert pair.sessions["s"].token_ids == text[: text.index(stop) + 1]
    assert pair.sessions["s"].result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("gamma", [0, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 13])
def test_max_tokens_is_met_exactly(tiny_pair, plain, gamma, max_tokens):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=gamma))
    pair.submit("s", prompts(1)[0], SamplingParams(max_tokens=max_tokens, temperature=0.0))
    pair.run()
    assert pair.sessions["s"].token_ids == plain["greedy"][0][:max_tokens]
    assert pair.sessions["s"].result.finish_reason is FinishReason.LENGTH
    assert pair.sessions["s"].result.num_generated_tokens == max_tokens


def test_logprobs_belong_to_the_committed_tokens_with_and_without_drafts(tiny_pair):
    rows = {}
    for gamma in (0, 6):
        pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=gamma))
        pair.submit("s", prompts(1)[0], SamplingParams(max_tokens=30, temperature=0.7, seed=2, logprobs=3))
        pair.run()
        session = pair.sessions["s"]
        rows[gamma] = [entry for message in session.messages for entry in message.logprobs]
        assert [entry.token_id for entry in rows[gamma]] == session.token_ids
    assert rows[0] == rows[6]
    assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in rows[0])


@pytest.mark.parametrize("rows", [16, 48, 128])
def test_a_prompt_is_as_likely_in_chunks_beside_drafts_and_after_a_cached_prefix_as_alone(tiny_pair, rows):
    prompt = [*range(3, 103)]
    sampling = SamplingParams(max_tokens=20, temperature=0.7, seed=2, logprobs=2, prompt_logprobs=2)
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4), max_num_seqs=16, max_num_batched_tokens=rows)
    pair.submit("cached", prompt, SAMPLINGS["greedy"])
    for _ in range(8):
        pair.round()
    pair.submit("judged", prompt, sampling)
    pair.run()
    messages = pair.sessions["judged"].messages
    judged = [entry for message in messages for entry in message.prompt_logprobs]
    assert [entry.token_id for entry in judged] == prompt[1:]
    first = next(index for index, message in enumerate(messages) if message.token_ids)
    # The last ones may come with the first token.
    assert not any(message.prompt_logprobs for message in messages[first + 1 :])
    # One token after another, each chosen from the row whose likelihoods are told.
    alone = EnginePair(*tiny_pair)
    for place in (1, 17, 63, 99):
        forced = SamplingParams(max_tokens=1, logprobs=2, allowed_token_ids=(prompt[place],))
        alone.submit(f"{place}", prompt[:place], forced, SpeculationParams(enabled=False))
        alone.run()
        [entry] = alone.sessions[f"{place}"].messages[-1].logprobs
        assert entry == judged[place - 1]
