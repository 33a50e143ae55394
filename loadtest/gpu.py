"""Steps and whole rounds on a GPU, of models with the shape of an 8B target and a 1B drafter: `make bench NAME=gpu`.

Weights are random, so texts mean nothing and the two models would never agree. Speed does not depend on that; how
many drafts are accepted does. So acceptance is IMPOSED: both forward passes run in full, then one logit a row is
raised, so that the target follows a fixed rule and the drafter guesses it with the probability asked for. Both models
run in one engine on one device and take turns, as in a verifier with the drafter inside: no network, and no drafting
during verification.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from loadtest.bench import Table, bench_parser, report
from loadtest.gpu_models import SHAPES, ImposedDecoder, RandomModel, mix
from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import CommittedTokens, GenerateRequest, ModelIdentity, SpeculationRecord
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Submit, TargetLimits
from paceline.drafting.colocated import LOCAL, ColocatedEngine
from paceline.engine.batch import Batch
from paceline.engine.decoder import Decoder
from paceline.engine.draft_scheduler import DraftLimits
from paceline.engine.drafter import DraftEngine
from paceline.engine.kv import KVCache
from paceline.engine.target import TargetEngine

VERIFY_ROWS = 8
MAX_BATCHED_TOKENS = 256
MAX_LOGIT_DISTANCE = 0.1
MODES = ("unrecorded", "recorded")


def decode_batch(sessions: int, rows_each: int, context: int, vocab_size: int) -> Batch:
    """One step of sessions with `context` committed tokens: a root and a chain of rows_each - 1 nodes each."""
    rows = sessions * rows_each
    blocks_each = -(-context // BLOCK_SIZE)
    tables = np.arange(sessions * blocks_each, dtype=np.int32).reshape(sessions, blocks_each)
    session, depth = np.divmod(np.arange(rows), rows_each)
    scratch = sessions * blocks_each * BLOCK_SIZE + session * rows_each
    place = tables[session, (context - 1) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    ancestors = scratch[:, None] + np.arange(1, max(2, rows_each))
    return Batch(
        token_ids=mix(session, depth, 3) % vocab_size,
        positions=context - 1 + depth,
        slots=np.where(depth == 0, place, scratch + depth),
        sequences=session.astype(np.int32),
        context_lens=np.full(rows, context, np.int32),
        ancestors=ancestors.astype(np.int32),
        num_ancestors=depth.astype(np.int32),
        block_tables=tables,
        logit_rows=np.arange(rows),
    )


def step_seconds(decoder: Decoder, batch: Batch, cache: KVCache, repeats: int) -> float:
    """Median time of a step from the batch on the host to the logits on the host."""
    times = []
    for _ in range(repeats + 3):
        started_s = time.perf_counter()
        decoder.forward(batch, cache).cpu()
        times.append(time.perf_counter() - started_s)
    return median(times[3:])


def measure_steps(model: RandomModel, arguments: argparse.Namespace) -> tuple[list[dict[str, object]], bool]:
    """Prints and returns the table of step times of one model; false when recorded steps differ from others."""
    decoders = {mode: model.decoder() for mode in MODES}
    gigabytes = decoders["recorded"].weight_bytes / 1e9
    print(f"\n{model.shape.name}, {gigabytes:.2f} GB of bf16 weights a step, {arguments.context} tokens of context")
    print("GB/s: weights over the time of the whole step")
    cases = [(rows, 1) for rows in arguments.rows]
    cases += [(rows // VERIFY_ROWS, VERIFY_ROWS) for rows in arguments.rows if rows >= VERIFY_ROWS]
    most = max(sessions * (-(-arguments.context // BLOCK_SIZE) + each) for sessions, each in cases)
    cache = decoders["recorded"].new_cache(most)
    decoders["recorded"].prepare(max(arguments.rows), cache)
    table, rows, same = Table(), list[dict[str, object]](), True
    for sessions, rows_each in cases:
        batch = decode_batch(sessions, rows_each, arguments.context, model.shape.vocab_size)
        seconds = {mode: step_seconds(decoders[mode], batch, cache, arguments.repeats) for mode in MODES}
        same = same and _distance(decoders, batch, cache) < MAX_LOGIT_DISTANCE
        milliseconds = {f"{mode}_ms": round(seconds[mode] * 1e3, 4) for mode in MODES}
        rows.append({"rows": batch.num_rows, "sessions": sessions, **milliseconds})
        table.add(rows[-1] | {f"{mode} GB/s": round(gigabytes / seconds[mode]) for mode in MODES})
    if not same:
        print("NOT OK: logits of recorded and unrecorded steps differ")
    return rows, same


def _distance(decoders: dict[str, Decoder], batch: Batch, cache: KVCache) -> float:
    """Relative distance of the logits of a recorded step from those of another one."""
    expected, found = (decoders[mode].forward(batch, cache).cpu() for mode in MODES)
    return float((found - expected).norm() / expected.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of all sessions gave."""

    tokens_per_s: float
    texts: list[list[int]]
    records: list[SpeculationRecord]


def engine_of(
    target: Decoder, drafter: Decoder | None, arguments: argparse.Namespace, sessions: int
) -> TargetEngine | ColocatedEngine:
    """An engine for a number of sessions that decodes plainly, or has the drafter inside and takes turns with it."""
    gamma = 0 if drafter is None else arguments.gamma
    blocks = sessions * (-(-(arguments.context + arguments.tokens) // BLOCK_SIZE) + 2)
    engine = TargetEngine(
        decoder=target,
        identity=_identity(target, "target"),
        num_blocks=blocks,
        limits=TargetLimits(
            max_num_seqs=sessions,
            max_num_batched_tokens=max(MAX_BATCHED_TOKENS, sessions * (gamma + 1)),
        ),
        policy=FixedGamma(gamma=gamma),
        clock=time.perf_counter,
    )
    if drafter is None:
        return engine
    limits = DraftLimits(
        width=1,
        max_rows=sessions,
        max_rows_per_session=1,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, sessions),
        max_num_seqs=sessions,
    )
    draft = DraftEngine(
        decoder=drafter,
        identity=_identity(drafter, "drafter"),
        num_blocks=blocks,
        limits=limits,
        clock=time.perf_counter,
    )
    return ColocatedEngine(engine, draft, wants_states=False, clock=time.perf_counter)


def _identity(decoder: Decoder, name: str) -> ModelIdentity:
    config = decoder.config
    return ModelIdentity(name=name, vocab_hash="", vocab_size=config.vocab_size, context_len=config.context_len)


def run_sessions(
    engine: TargetEngine | ColocatedEngine, arguments: argparse.Namespace, name: str, prompts: Sequence[Sequence[int]]
) -> Run:
    """Runs a session a prompt to its end; timed from when all of them were decoding."""
    texts: list[list[int]] = [[] for _ in prompts]
    records: list[SpeculationRecord] = []
    for serial, prompt in enumerate(prompts):
        request = GenerateRequest(
            session_id=f"{name} {serial}",
            epoch=1,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True),
            speculation=SpeculationParams(),
        )
        engine.handle(Submit(request=request, serial=serial, drafter_address=LOCAL))
    before, started_s = 0, 0.0
    while len(records) < len(prompts):
        if not started_s and all(texts):
            before, started_s = sum(map(len, texts)), time.perf_counter()
        for serial, committed in engine.step().committed:
            assert isinstance(committed, CommittedTokens), committed
            texts[serial] += committed.token_ids
            if committed.result is not None:
                records.append(committed.result.speculation)
    seconds = time.perf_counter() - started_s
    return Run(tokens_per_s=(sum(map(len, texts)) - before) / seconds, texts=texts, records=records)


def measure_rounds(
    target: RandomModel, drafter: RandomModel, arguments: argparse.Namespace
) -> tuple[list[dict[str, float]], bool]:
    """Prints and returns the table of plain and speculative speed; false when their texts differ."""
    print(
        f"\nwhole engines on one device in turns, acceptance IMPOSED at {arguments.acceptance:g} a draft token, "
        f"chains of {arguments.gamma}, prompts of {arguments.context}, {arguments.tokens} tokens a session, greedy"
    )
    target_decoder = ImposedDecoder(target.decoder(), 1.0)
    draft_decoder = ImposedDecoder(drafter.decoder(), arguments.acceptance)
    vocab_size = target.shape.vocab_size
    table, rows, same = Table(), list[dict[str, float]](), True
    for sessions in arguments.sessions:
        engines = [engine_of(target_decoder, each, arguments, sessions) for each in (None, draft_decoder)]
        numbers = np.arange(arguments.context)
        prompts = [mix(np.full_like(numbers, serial), numbers, 4) % vocab_size for serial in range(sessions)]
        # The first run records the graphs.
        plain, speculative = (
            [
                run_sessions(engine, arguments, name, [each.tolist() for each in prompts])
                for name in ("first", "second")
            ][1]
            for engine in engines
        )
        same = same and plain.texts == speculative.texts
        rows.append(_round_row(sessions, plain, speculative))
        table.add(rows[-1])
    if not same:
        print("NOT OK: speculative texts differ from plain ones")
    return rows, same


def _round_row(sessions: int, plain: Run, speculative: Run) -> dict[str, float]:
    records = speculative.records
    accepted = sum(record.num_accepted_draft_tokens for record in records)
    return {
        "sessions": sessions,
        "plain_tokens_per_s": round(plain.tokens_per_s, 1),
        "speculative_tokens_per_s": round(speculative.tokens_per_s, 1),
        "ratio": round(speculative.tokens_per_s / plain.tokens_per_s, 3),
        "accepted_per_round": round(accepted / max(1, sum(record.num_spec_steps for record in records)), 3),
        "acceptance_rate": round(accepted / max(1, sum(record.num_draft_tokens for record in records)), 4),
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("gpu", __doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="sizes of both models (default 8b)")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu only to try out this script, with TRITON_INTERPRET=1",
    )
    parser.add_argument("--rows", type=_numbers, default=_numbers("1,2,4,8,16,32,64,128,256"), help="rows of a step")
    parser.add_argument("--sessions", type=_numbers, default=_numbers("1,2,4,8,16,32,64"), help="of whole rounds")
    parser.add_argument("--context", type=int, default=512, help="committed tokens, and prompt tokens (default 512)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a session generates (default 128)")
    parser.add_argument("--gamma", type=int, default=4, help="draft tokens a round (default 4)")
    parser.add_argument("--acceptance", type=float, default=0.8, help="IMPOSED probability of a match (default 0.8)")
    parser.add_argument("--repeats", type=int, default=20, help="steps behind each median (default 20)")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write(
            f"gpu: needs a CUDA device (with 48 GB for the shape 8b) and a torch built for CUDA; torch here is "
            f"{torch.__version__} and finds none. --shape tiny --device cpu tries out the script without one.\n"
        )
        raise SystemExit(2)
    raise SystemExit(0 if measure(arguments) else 1)


def measure(arguments: argparse.Namespace) -> bool:
    """Measures steps of both models and whole rounds; true when graphs and texts are right."""
    device = torch.device(arguments.device)
    place = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, to try out the script: no figures"
    print(f"{place}, torch {torch.__version__}, random weights")
    target, drafter = (RandomModel(shape, device) for shape in SHAPES[arguments.shape])
    target_steps, target_ok = measure_steps(target, arguments)
    draft_steps, draft_ok = measure_steps(drafter, arguments)
    rounds, texts_ok = measure_rounds(target, drafter, arguments)
    return report(
        "gpu",
        device=place,
        torch=torch.__version__,
        shape=arguments.shape,
        context=arguments.context,
        imposed_acceptance=arguments.acceptance,
        gamma=arguments.gamma,
        target_steps=target_steps,
        draft_steps=draft_steps,
        rounds=rounds,
        ok=target_ok and draft_ok and texts_ok,
    )
