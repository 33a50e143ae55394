"""Parts that `loadtest.gpu` measures inside one process: the card, kernels, steps, the choice of tokens, whole rounds.

Each part says a line a figure, at once. Weights are random, so texts mean nothing; speed does not depend on that. Where
drafts are accepted, acceptance is IMPOSED: all of both models is computed, then one logit a row is raised.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from loadtest.gpu import LINES, PART
from loadtest.gpu_models import SHAPES, ModelShape, RandomModel
from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import GenerateRequest, ModelIdentity, SpeculationRecord
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.processors import Truncation
from paceline.core.target_events import Submit, TargetLimits
from paceline.engine.backends.cpu.step_kernels import choice_of
from paceline.engine.backends.cuda.attention import attend
from paceline.engine.backends.cuda.choose import CHOICE_WORDS, Questions, choose, rank
from paceline.engine.backends.cuda.plan import PlanFields, StepBuffer, aligned_bytes, field_arrays, padded
from paceline.engine.backends.cuda.stream import Stream
from paceline.engine.batch import Batch
from paceline.engine.decoder import Decoder
from paceline.engine.draft_scheduler import DraftLimits
from paceline.engine.drafter import DraftEngine
from paceline.engine.loop import run_sync
from paceline.engine.pending import VerifyRequest
from paceline.engine.target import LOCAL, TargetEngine

CONTEXT = 600
# Layers that attention is timed over: their KV flushes the chip's cache between two uses of one.
LAYERS = 8
GREEDY, UNFILTERED = Truncation(), Truncation(greedy=False, inverse_temperature=1.25)
SAMPLED = replace(UNFILTERED, top_p=0.95)
RULES = {"greedy": GREEDY, "at 0.8": UNFILTERED, "at 0.8 with top-p 0.95": SAMPLED}


def say(**figure: Any) -> None:
    """Prints a line of JSON, and adds it to the file of all parts, if there is one."""
    line = json.dumps({"part": os.environ.get(PART, ""), **figure})
    print(line, flush=True)
    if LINES in os.environ:
        with open(os.environ[LINES], "a", encoding="utf-8") as lines:
            lines.write(f"{line}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Where the parts run, and how much they do.

    Attributes:
        shape: Shape of target and drafter, in `SHAPES`.
        loads: Sessions, rows of each and tokens of context, of the steps that are timed.
        sessions: Sessions of whole rounds.
        tokens: Tokens that a session of a round generates.
        most_rows: Most rows of a step of whole rounds.
        temperature: Temperature of their requests; and top_p.
    """

    device: torch.device
    shape: str = "8b"
    loads: Sequence[tuple[int, int, int]] = (
        *((count, 1, CONTEXT) for count in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        *((count, 5, CONTEXT) for count in (1, 8, 32, 64)),
        *((count, 1, 4 * CONTEXT) for count in (1, 64)),
    )
    sessions: Sequence[int] = (1, 8, 64)
    tokens: int = 96
    most_rows: int = 512
    temperature: float = 0.8
    top_p: float = 0.95
    gamma: int = 4
    acceptance: float = 0.8
    repeats: int = 20
    warm_ups: int = 3

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time that the device, or a CPU, takes for some work."""
        times = list[float]()
        for _ in range(self.warm_ups + self.repeats):
            began_s = time.perf_counter()
            if self.device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                work()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop) / 1e3)
            else:
                work()
                times.append(time.perf_counter() - began_s)
        return median(times[self.warm_ups :])


def facts(contact: Contact) -> None:
    """The card and its ceilings: bytes a second, and products of the models' shapes at the rows of a step."""
    import triton

    card = torch.cuda.get_device_properties(contact.device)
    say(card=card.name, memory_gb=round(card.total_memory / 1e9, 1), torch=torch.__version__, triton=triton.__version__)
    big = torch.empty(1 << 30, dtype=torch.uint8, device=contact.device)
    other, pinned = torch.empty_like(big), torch.empty(1 << 25, dtype=torch.uint8, pin_memory=True)
    copied_s = contact.seconds(partial(other.copy_, big))
    fetched_s = contact.seconds(partial(pinned.copy_, big[: len(pinned)], non_blocking=True))
    say(copy_tb_s=round(2 * len(big) / copied_s / 1e12, 2), to_host_gb_s=round(len(pinned) / fetched_s / 1e9, 1))
    del big, other
    for shape in SHAPES[contact.shape]:
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = {
            "qkv": (query + 2 * kv, shape.hidden_size),
            "out": (shape.hidden_size, query),
            "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
            "down": (shape.hidden_size, shape.intermediate_size),
            "head": (shape.vocab_size, shape.hidden_size),
        }
        for name, size in sizes.items():
            _product(contact, shape, name, size)


def _product(contact: Contact, shape: ModelShape, name: str, size: tuple[int, int]) -> None:
    """As many weights as no cache holds, by turns."""
    count = max(2, int(2e8 // (2 * size[0] * size[1])))
    weights = [torch.randn(size, device=contact.device, dtype=torch.bfloat16) for _ in range(count)]
    microseconds = {}
    for rows in (1, 2, 4, 8, 16, 64, 128, 256, 320, 512):
        entering = torch.randn((rows, size[1]), device=contact.device, dtype=torch.bfloat16)
        microseconds[rows] = round(contact.seconds(partial(_multiply, entering, weights)) / count * 1e6, 1)
    say(product=f"{name} of {shape.name}", us_by_rows=microseconds, us_at_3_tb_s=round(2 * size[0] * size[1] / 3e6, 1))


def _multiply(entering: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(entering, weight)


def decode_batch(sessions: int, rows_each: int, context: int, vocab_size: int) -> Batch:
    """A step of sessions with `context` committed tokens: a root and a chain of rows_each - 1 nodes each."""
    rows, blocks_each = sessions * rows_each, -(-context // BLOCK_SIZE)
    tables = np.arange(sessions * blocks_each, dtype=np.int32).reshape(sessions, blocks_each)
    session, depth = np.divmod(np.arange(rows), rows_each)
    scratch = sessions * blocks_each * BLOCK_SIZE + session * rows_each
    place = tables[session, (context - 1) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    ancestors = scratch[:, None] + np.arange(1, max(2, rows_each))
    return Batch(
        token_ids=(session * 7_919 + depth * 104_729) % vocab_size,
        positions=context - 1 + depth,
        slots=np.where(depth == 0, place, scratch + depth),
        sequences=session.astype(np.int32),
        context_lens=np.full(rows, context, np.int32),
        ancestors=ancestors.astype(np.int32),
        num_ancestors=depth.astype(np.int32),
        block_tables=tables,
        logit_rows=np.arange(rows),
    )


def num_blocks(load: tuple[int, int, int]) -> int:
    """Pages of KV that a `decode_batch` needs."""
    sessions, rows_each, context = load
    return sessions * (-(-context // BLOCK_SIZE) + rows_each)


def chains(sessions: int, rows_each: int, context: int, rule: Truncation) -> VerifyRequest:
    """The guesses of such a batch."""
    counts = np.full(sessions, rows_each - 1)
    stops = np.cumsum(counts)
    return VerifyRequest(
        rows=np.arange(sessions) * rows_each,
        positions=np.full(sessions, context),
        choices=np.concatenate([choice_of(rule, seed) for seed in range(sessions)]),
        starts=stops - counts,
        stops=stops,
        tokens=np.zeros(stops[-1], np.int32),
        parents=np.tile(np.arange(rows_each - 1, dtype=np.int32) - 1, sessions),
    )


def attention(contact: Contact) -> None:
    """Microseconds of one layer of the target's shape, and what of KV it reads in a second."""
    shape = SHAPES[contact.shape][0]
    kind = torch.bfloat16 if contact.device.type == "cuda" else torch.float32
    for load in contact.loads:
        batch, blocks = decode_batch(*load, shape.vocab_size), num_blocks(load)
        size = (LAYERS, blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        keys, values = (torch.randn(size, device=contact.device, dtype=kind) for _ in range(2))
        rows = padded(batch.num_rows)
        query = torch.randn((rows, shape.num_heads, shape.head_dim), device=contact.device, dtype=kind)
        arrays = field_arrays(batch, rows, shape.num_kv_heads, 0)
        lanes = PlanFields.of(
            StepBuffer(Stream(contact.device), sum(map(aligned_bytes, arrays.values()))).send(arrays)
        ).lanes

        def run(lanes: Any = lanes, query: Any = query, keys: Any = keys, values: Any = values) -> None:
            for layer in range(LAYERS):
                attend(lanes, query, keys[layer], values[layer], shape.head_dim**-0.5)

        (work,) = Stream(contact.device).record([run])
        seconds = contact.seconds(work) / LAYERS
        read = 2 * load[0] * load[2] * shape.num_kv_heads * shape.head_dim * keys.element_size()
        say(attention=load, us=round(seconds * 1e6, 1), kv_gb_s=round(read / seconds / 1e9))


def steps(contact: Contact) -> None:
    """Milliseconds of recorded steps of both models, from the batch on the host to tokens on the host."""
    for shape in SHAPES[contact.shape]:
        decoder = RandomModel(shape, contact.device).decoder()
        cache = decoder.new_cache(max(map(num_blocks, contact.loads)))
        began_s = time.perf_counter()
        decoder.prepare(max(sessions * rows for sessions, rows, _ in contact.loads), cache)
        say(
            recorded=shape.name,
            s=round(time.perf_counter() - began_s, 1),
            weights_gb=round(decoder.weight_bytes / 1e9, 2),
        )
        for load in contact.loads:
            batch, walks = decode_batch(*load, shape.vocab_size), chains(*load, SAMPLED)
            times = []
            for _ in range(contact.warm_ups + contact.repeats):
                began_s = time.perf_counter()
                decoder.launch(batch, cache, walks).follow(walks)
                times.append(time.perf_counter() - began_s)
            on_device_s = contact.seconds(partial(decoder.launch, batch, cache, walks))
            say(
                step=load,
                model=shape.name,
                ms=round(median(times[contact.warm_ups :]) * 1e3, 3),
                device_ms=round(on_device_s * 1e3, 3),
            )


def sampler(contact: Contact) -> None:
    """Microseconds to choose tokens, and to rank guesses, for all rows of a step."""
    vocab_size = SHAPES[contact.shape][0].vocab_size
    for rows in sorted({sessions * each for sessions, each, _ in contact.loads}):
        logits = 3.0 * torch.randn((rows, vocab_size), device=contact.device)
        for name, rule in RULES.items():
            words = np.concatenate([choice_of(rule, seed) for seed in range(rows)]).view(np.int64)
            questions = Questions(
                rows=torch.arange(rows, device=contact.device),
                positions=torch.full((rows,), CONTEXT, device=contact.device),
                choices=torch.from_numpy(words.reshape(rows, CHOICE_WORDS)).to(contact.device),
            )
            chosen_s, ranked_s = (contact.seconds(partial(each, logits, questions)) for each in (choose, rank))
            say(rows=rows, rule=name, choose_us=round(chosen_s * 1e6, 1), rank_us=round(ranked_s * 1e6, 1))


def kernels(contact: Contact) -> None:
    """How many kernels a step launches, and which take longest."""
    from torch.profiler import ProfilerActivity, profile

    shape = SHAPES[contact.shape][0]
    decoder = RandomModel(shape, contact.device).decoder()
    cache = decoder.new_cache(max(map(num_blocks, contact.loads)))
    decoder.prepare(64, cache)
    for load in ((1, 1, CONTEXT), (64, 1, CONTEXT), (8, 5, CONTEXT)):
        batch, walks = decode_batch(*load, shape.vocab_size), chains(*load, SAMPLED)
        decoder.launch(batch, cache, walks).follow(walks)
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            for _ in range(3):
                decoder.launch(batch, cache, walks).follow(walks)
        events = sorted(watched.key_averages(), key=lambda event: -event.self_device_time_total)
        longest = {
            each.key[:60]: [each.count // 3, round(each.self_device_time_total / 3e3, 3)] for each in events[:12]
        }
        busy_ms = sum(each.self_device_time_total for each in events) / 3e3
        count = sum(each.count for each in events if each.self_device_time_total > 0) // 3
        say(kernels_of=load, kernels=count, busy_ms=round(busy_ms, 3), longest_by_count_and_ms=longest)


@dataclass(slots=True, kw_only=True)
class Run:
    """Results of a run of all sessions."""

    tokens_per_s: float = 0.0
    texts: list[list[int]] = field(default_factory=list)
    records: list[SpeculationRecord] = field(default_factory=list)


def rounds(contact: Contact) -> None:
    """Tokens a second of whole engines, plain and with the drafter inside, which takes turns on the same card."""
    models = [RandomModel(shape, contact.device) for shape in SHAPES[contact.shape]]
    target, drafter = (model.decoder(each) for model, each in zip(models, (1.0, contact.acceptance), strict=True))
    for sessions in contact.sessions:
        found = []
        for draft in (None, drafter):
            engine = engine_of(contact, target, draft, sessions)
            found.append(_run_sessions(contact, engine, sessions))
        plain, drafted = found
        accepted = sum(record.num_accepted_draft_tokens for record in drafted.records)
        say(
            sessions=sessions,
            plain_tokens_per_s=round(plain.tokens_per_s, 1),
            drafting_inside_tokens_per_s=round(drafted.tokens_per_s, 1),
            ratio=round(drafted.tokens_per_s / plain.tokens_per_s, 3),
            imposed_acceptance=contact.acceptance,
            accepted_a_round=round(accepted / max(1, sum(record.num_spec_steps for record in drafted.records)), 3),
            same_texts=plain.texts == drafted.texts,
        )


def engine_of(contact: Contact, target: Decoder, drafter: Decoder | None, sessions: int) -> TargetEngine:
    """An engine for a number of sessions that decodes plainly, or has the drafter inside."""
    gamma = 0 if drafter is None else contact.gamma
    blocks = sessions * (-(-(CONTEXT + contact.tokens) // BLOCK_SIZE) + 2)
    limits = TargetLimits(max_num_seqs=sessions, max_num_batched_tokens=contact.most_rows)
    engine = TargetEngine(
        decoder=target,
        identity=_identity(target, "target"),
        num_blocks=blocks,
        limits=limits,
        policy=FixedGamma(gamma=gamma),
        clock=time.perf_counter,
    )
    target.prepare(limits.max_num_batched_tokens, engine.cache)
    if drafter is None:
        return engine
    draft = DraftEngine(
        decoder=drafter,
        identity=_identity(drafter, "drafter"),
        num_blocks=blocks,
        limits=DraftLimits(
            width=1,
            max_rows=sessions,
            max_rows_per_session=1,
            max_num_batched_tokens=contact.most_rows,
            max_num_seqs=sessions,
        ),
        clock=time.perf_counter,
    )
    drafter.prepare(contact.most_rows, draft.cache, drafts=True)
    engine.draft_inside(draft)
    return engine


def _identity(decoder: Decoder, name: str) -> ModelIdentity:
    config = decoder.config
    return ModelIdentity(name=name, vocab_hash="", vocab_size=config.vocab_size, context_len=config.context_len)


def _run_sessions(contact: Contact, engine: TargetEngine, sessions: int) -> Run:
    """Runs all sessions to their ends; timed from when all of them were decoding."""
    run = Run(texts=[[] for _ in range(sessions)])
    for number in range(sessions):
        prompt = (np.arange(CONTEXT) * 31 + number * 7_919) % 100 + 1
        request = GenerateRequest(
            session_id=str(number),
            epoch=1,
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(
                max_tokens=contact.tokens,
                temperature=contact.temperature,
                top_p=contact.top_p,
                seed=number,
                ignore_eos=True,
            ),
            speculation=SpeculationParams(),
        )
        engine.handle(Submit(request=request, number=number, drafter_address=LOCAL))
    before, started_s = 0, 0.0
    while len(run.records) < sessions:
        if not started_s and all(run.texts):
            before, started_s = sum(map(len, run.texts)), time.perf_counter()
        commit = run_sync(engine.step()).commit
        for number, _, token_ids, _ in commit:
            run.texts[number] += token_ids
        run.records += [each.result.speculation for each in commit.events.values() if each.result is not None]
    run.tokens_per_s = (sum(map(len, run.texts)) - before) / (time.perf_counter() - started_s)
    return run


PARTS: dict[str, Callable[[Contact], None]] = {
    "facts": facts,
    "attention": attention,
    "steps": steps,
    "sampler": sampler,
    "kernels": kernels,
    "rounds": rounds,
}
