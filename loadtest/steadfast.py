"""Requests whose answers are known, and clients of both doors that keep the history of what they sent and got."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from tokenizers import Tokenizer
from tqdm import tqdm

from loadtest.histories import GRPC, HTTP, History, Kind
from loadtest.resuming_http import ResumingHttpClient
from paceline.checkpoints.corpus import unseen_prompts
from paceline.client.resuming import ResumingClient
from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.errors import OverloadedError, PacelineError
from paceline.core.params import COUPLED
from paceline.rpc.v1 import common_pb2, gateway_pb2

Request = gateway_pb2.GatewayGenerateRequest
NUM_PROMPTS = 40
# Notes everything in a history, and yields after every piece.
Answer = Callable[[Request, History], AsyncGenerator[None, None]]


def mixed_requests(count: int, max_tokens: int, method: str = "") -> list[Request]:
    """Requests of which every other one is sampled, with penalties; each has a prompt or a seed of its own."""
    prompts = unseen_prompts(min(count, NUM_PROMPTS))
    return [_request(prompts[index % len(prompts)], index, max_tokens, method) for index in range(count)]


def long_request(index: int, max_tokens: int, context_len: int) -> Request:
    """A request for the demo target whose prompt and answer fill the model's whole context."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    text = "\n\n".join(unseen_prompts(NUM_PROMPTS, seed=index))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    request = _request("", index, max_tokens, "")
    request.prompt_token_ids.ids.extend((ids * (1 + context_len // len(ids)))[: context_len - max_tokens])
    return request


def _request(prompt: str, index: int, max_tokens: int, method: str) -> Request:
    sampled = index % 2
    sampling = common_pb2.SamplingParams(
        max_tokens=max_tokens,
        temperature=0.8 if sampled else 0.0,
        top_p=0.95 if sampled else 1.0,
        repetition_penalty=1.05 if sampled else 1.0,
        presence_penalty=0.2 if sampled else 0.0,
        ignore_eos=True,
        seed=index,
    )
    speculation = common_pb2.SpeculationParams(enabled=True, acceptance=COUPLED, method=method)
    return Request(prompt=prompt, sampling=sampling, speculation=speculation)


def over(client: ResumingClient) -> Answer:
    """Answers that come through a client."""
    return partial(_over, client)


async def _over(client: ResumingClient, request: Request, history: History) -> AsyncGenerator[None, None]:
    history.door = HTTP if isinstance(client, ResumingHttpClient) else GRPC
    async with aclosing(client.stream(request)) as pieces:
        async for piece in pieces:
            if piece.token_ids or piece.text:
                history.note(Kind.PIECE, token_ids=piece.token_ids, text=piece.text)
            if piece.HasField("result"):
                history.prefill_s = piece.result.timings.prefill_ns / 1e9
                history.note(Kind.ENDED, piece.result.finish_reason)
            yield


async def run_one(
    answer: Answer,
    request: Request,
    index: int,
    on_piece: Callable[[History], None] = lambda _: None,
    gives_up: Callable[[], bool] = lambda: False,
) -> History:
    """Runs a request to its end; one that finds no place comes again when the answer says."""
    history = History(index=index)
    while not history.events or (history.never_begun and not gives_up()):
        history.note(Kind.ASKED)
        try:
            async with aclosing(answer(request, history)) as pieces:
                async for _ in pieces:
                    on_piece(history)
        except OverloadedError as error:
            history.note(Kind.REFUSED, str(error))
            await asyncio.sleep(error.retry_after_s * random.uniform(0.5, 1.0))
        except PacelineError as error:
            history.note(Kind.FAILED, f"{type(error).__name__}: {error}")
    return history


async def run_each(answer: Answer, requests: Sequence[Request]) -> list[History]:
    """Runs all requests at once, each to its end.

    Raises:
        RuntimeError: A request failed.
    """
    with tqdm(total=len(requests), desc="undisturbed", unit="stream") as bar:

        async def one(index: int) -> History:
            history = await run_one(answer, requests[index], index)
            bar.update()
            return history

        histories = await asyncio.gather(*(one(index) for index in range(len(requests))))
    if failed := [history.error for history in histories if not history.whole]:
        raise RuntimeError(f"{len(failed)} undisturbed streams failed, first: {failed[0]}")
    return histories


async def keep_running(
    answers: Sequence[Answer],
    requests: Sequence[Request],
    is_over: Callable[[], bool],
    on_end: Callable[[History], None],
) -> list[History]:
    """Runs each request again and again, all side by side, until it is over; those under way then run to their end.

    Args:
        answers: Doors, which requests take in turn.
        requests: Requests to send; each runs once at least.
        is_over: Whether no new request is to begin.
        on_end: Called with each history that has come to its end.
    """

    async def again(index: int) -> list[History]:
        histories: list[History] = []
        while not histories or not is_over():
            answer = answers[(index + len(histories)) % len(answers)]
            histories.append(await run_one(answer, requests[index], index, gives_up=is_over))
            on_end(histories[-1])
        return histories

    runs = await asyncio.gather(*(again(index) for index in range(len(requests))))
    return [history for run in runs for history in run]
