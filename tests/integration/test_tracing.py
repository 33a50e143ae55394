"""One trace a request, from the gateway to the drafter, as a real OTLP collector gets it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from paceline.core.errors import ConfigError
from paceline.core.messages import DRAFTER, VERIFIER, CloseSession, Commit, OpenSession, token_digest
from paceline.core.params import SamplingParams
from paceline.drafter.tracing import DraftTraces
from paceline.gateway.config import GatewayConfig
from paceline.gateway.doors import Addresses
from paceline.gateway.service import serve
from paceline.gateway.text.codec import TextCodec
from paceline.obs import otlp
from paceline.obs.tracing import open_tracing
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.store.base import Replica
from tests.integration.conftest import know, running_drafter, verifier_at
from tests.support.checkpoints import save_pair
from tests.support.collector import Collector, ReceivedSpan, new_traceparent, running_collector
from tests.support.guesses import SessionDrafts, to_commits, to_drafts
from tests.support.memory_store import MemoryStore
from tests.support.scripted_fleet import Script, ScriptedFleet, joining_gateway, scripted_fleet

GATEWAY_SERVICE, VERIFIER_SERVICE, DRAFTER_SERVICE = (
    "paceline-gateway",
    "paceline-verifier",
    "paceline-drafter",
)
ROUND_ATTRIBUTES = {
    "paceline.gamma",
    "paceline.num_accepted",
    "paceline.batch_size",
    "paceline.price",
    "paceline.rows",
    "paceline.prompt_rows",
    "paceline.wait_ms",
    "paceline.step_ms",
    "paceline.since_last_ms",
}
ZONE = "eu-1b"
PROMPT = "the quick brown fox"
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True, scope="module")
def spans_are_sent_at_once() -> AsyncIterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(otlp, "BATCH_INTERVAL_S", 0.02)
        yield


@dataclass(frozen=True, kw_only=True)
class TracedFleet:
    """A gateway, a verifier and a drafter on tiny models; only what a caller asks to trace is traced."""

    http: httpx.AsyncClient
    collector: Collector
    drafter_address: str

    async def complete(self, traceparent: str = "", path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
        asked = {"prompt": PROMPT} if path.endswith("/completions") and "messages" not in fields else {}
        body = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "seed": 3, **asked, **fields}
        headers = {"traceparent": traceparent} if traceparent else {}
        response = await self.http.post(path, json=body, headers=headers)
        return {"status": response.status_code, **response.json()}

    async def traced(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        trace_id, traceparent = new_traceparent()
        return trace_id, await self.complete(traceparent, **fields)

    async def drafted(self) -> tuple[str, dict[str, Any]]:
        """A request with drafts from the drafter; the stream to it takes its time to come up."""
        async with asyncio.timeout(60):
            while True:
                trace_id, answer = await self.traced(speculation={"method": "draft_model"})
                if record_of(answer)["num_accepted_draft_tokens"]:
                    return trace_id, answer


@asynccontextmanager
async def traced(role: str, endpoint: str) -> AsyncIterator[Any]:
    name = f"{role}-0"
    async with open_tracing(endpoint, 0.0, role=role, replica_id=name, zone=ZONE) as tracer:
        yield tracer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory) -> AsyncIterator[TracedFleet]:
    target, draft = save_pair(tmp_path_factory.mktemp("traced-pair"))
    async with (
        running_collector() as (endpoint, collector),
        traced(VERIFIER, endpoint) as of_verifier,
        traced(DRAFTER, endpoint) as of_drafter,
        verifier_at(target, tracer=of_verifier) as (verifier_address, verifier),
        running_drafter(draft, tracer=of_drafter) as (drafter_address, drafter),
    ):
        know(verifier, drafter_address)
        store = MemoryStore()
        for name, role, address, host in (
            ("verifier-0", VERIFIER, verifier_address, verifier),
            ("drafter-0", DRAFTER, drafter_address, drafter),
        ):
            replica = Replica(replica_id=name, role=role, address=address, identity=host.identity, max_sessions=4)
            await store.announce(replica, 3600)
        config = GatewayConfig(
            model=(),
            port=0,
            grpc_port=0,
            zone=ZONE,
            otlp_traces_endpoint=endpoint,
            trace_sample_ratio=0.0,
            grace_s=5.0,
        )
        async with running_gateway(config, store, {"tiny": TextCodec.from_folder(target)}) as addresses:
            async with httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=60, trust_env=False) as http:
                yield TracedFleet(http=http, collector=collector, drafter_address=drafter_address)


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig, store: MemoryStore, codecs: dict[str, TextCodec]
) -> AsyncIterator[Addresses]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(serve(config, store, codecs, stop, ready.set_result))
    await asyncio.wait({gateway, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()
    finally:
        stop.set()
        await gateway


def record_of(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["metrics"]["speculative_decoding"]


def rounds_of(span: ReceivedSpan) -> list[dict[str, Any]]:
    return [attributes for name, _, attributes in span.events if name == "round"]


@in_one_loop
async def test_a_trace_goes_from_the_gateway_over_the_verifier_to_the_drafter(fleet):
    trace_id, _ = await fleet.drafted()
    spans = await fleet.collector.trace(trace_id, "text_completion tiny", "verify", "draft")
    chain = {name: (span.service, span.kind) for name, span in spans.items()}
    assert chain == {
        "text_completion tiny": (GATEWAY_SERVICE, "server"),
        "placement": (GATEWAY_SERVICE, "client"),
        "verify": (VERIFIER_SERVICE, "server"),
        "queue": (VERIFIER_SERVICE, "internal"),
        "prefill": (VERIFIER_SERVICE, "internal"),
        "draft": (DRAFTER_SERVICE, "server"),
    }
    assert {span.zone for span in spans.values()} == {ZONE}
    parents = {
        "placement": "text_completion tiny",
        "verify": "placement",
        "queue": "verify",
        "prefill": "verify",
        "draft": "verify",
    }
    for child, parent in parents.items():
        assert spans[child].parent_id == spans[parent].span_id
    assert spans["verify"].attributes["paceline.drafter"] == fleet.drafter_address
    assert spans["verify"].attributes["paceline.draft_model"] == "tiny-drafter"
    assert not any(span.failed for span in spans.values())


@in_one_loop
async def test_queue_and_prefill_follow_one_another_inside_the_verifiers_span(fleet):
    trace_id, _ = await fleet.traced()
    spans = await fleet.collector.trace(trace_id, "verify", "text_completion tiny")
    queue, prefill, verify = spans["queue"], spans["prefill"], spans["verify"]
    assert verify.start_ns <= queue.start_ns <= queue.end_ns == prefill.start_ns <= prefill.end_ns <= verify.end_ns
    assert all(prefill.end_ns <= at_ns <= verify.end_ns for _, at_ns, _ in verify.events)


@in_one_loop
async def test_rounds_add_up_to_what_the_response_says_of_speculation(fleet):
    trace_id, answer = await fleet.drafted()
    record = record_of(answer)
    spans = await fleet.collector.trace(trace_id, "verify", "draft", "text_completion tiny")
    rounds = rounds_of(spans["verify"])
    assert all(set(each) == ROUND_ATTRIBUTES for each in rounds)
    # The first token comes from the prompt and is no round.
    assert len(rounds) == record["num_steps"] - 1
    assert sum(each["paceline.gamma"] for each in rounds) == record["num_draft_tokens"]
    assert sum(each["paceline.num_accepted"] for each in rounds) == record["num_accepted_draft_tokens"]
    assert {each["paceline.batch_size"] for each in rounds} == {1}
    assert all(0 <= each["paceline.price"] <= 1 for each in rounds)
    # One session is the whole step, and its prompt was read before.
    assert all(each["paceline.rows"] == 1 + each["paceline.gamma"] for each in rounds)
    assert {each["paceline.prompt_rows"] for each in rounds} == {0}
    for each in rounds:
        assert each["paceline.since_last_ms"] >= each["paceline.step_ms"] > 0
        assert 0 <= each["paceline.wait_ms"] <= each["paceline.since_last_ms"]
    verify = spans["verify"].attributes
    assert verify["paceline.num_draft_tokens"] == record["num_draft_tokens"]
    assert verify["paceline.num_accepted"] == record["num_accepted_draft_tokens"]
    assert verify["paceline.num_steps"] == record["num_steps"]
    assert verify["paceline.rounds_left_out"] == 0
    draft = spans["draft"].attributes
    assert draft["paceline.num_nodes"] >= record["num_accepted_draft_tokens"]
    assert draft["paceline.num_commits"] > 0
    answers = [attributes for name, _, attributes in spans["draft"].events if name == "drafts"]
    assert 0 < len(answers) + draft["paceline.drafts_left_out"] <= draft["paceline.num_commits"]
    for each in answers:
        assert set(each) == {"paceline.num_nodes", "paceline.lag_tokens", "paceline.reply_ms"}
        assert 0 <= each["paceline.lag_tokens"] <= draft["paceline.max_lag_tokens"]


@in_one_loop
async def test_a_long_session_shows_rounds_of_all_its_length_and_says_how_many_are_left_out(fleet):
    trace_id, answer = await fleet.traced(max_tokens=200, speculation={"enabled": False})
    verify = (await fleet.collector.trace(trace_id, "verify", "text_completion tiny"))["verify"]
    rounds = rounds_of(verify)
    assert len(rounds) + verify.attributes["paceline.rounds_left_out"] == record_of(answer)["num_steps"] - 1 == 199
    # 100 were full once; every second of all rounds is left, and the 20 slowest, whichever these are.
    assert 100 <= len(rounds) <= 120
    shown = {each["paceline.since_last_ms"] for each in rounds}
    assert len(shown) >= 20


@in_one_loop
async def test_the_request_span_says_what_was_asked_for_and_given(fleet):
    trace_id, answer = await fleet.traced(temperature=0.5, top_p=0.9, top_k=7, n=2, seed=2**64 - 5)
    spans = await fleet.collector.until(
        lambda: [span for span in fleet.collector.of_trace(trace_id) if span.service == GATEWAY_SERVICE],
        lambda got: len(got) == 3,
    )
    (request,) = [span for span in spans if span.name == "text_completion tiny"]
    told = request.attributes
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.max_tokens": 60,
        "gen_ai.request.seed": -5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 120,
        "gen_ai.usage.cache_read.input_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    }
    # Both samples hang below the one request.
    placements = [span for span in spans if span.name == "placement"]
    assert {span.parent_id for span in placements} == {request.span_id}
    assert {span.attributes["paceline.session_id"] for span in placements} == {f"{answer['id']}-{k}" for k in (0, 1)}


@in_one_loop
@pytest.mark.parametrize(
    ("fields", "status", "error", "model"),
    [
        ({"max_tokens": 0}, 400, "InvalidRequestError", "tiny"),
        ({"model": "huge" + "x" * 200}, 404, "ModelNotFoundError", "huge" + "x" * 121 + "..."),
    ],
)
async def test_a_request_that_is_refused_has_a_span_with_the_error(fleet, fields, status, error, model):
    trace_id, answer = await fleet.traced(**fields)
    assert answer["status"] == status
    (refused,) = await fleet.collector.until(lambda: fleet.collector.of_trace(trace_id), bool)
    # A client's mistake is no error of this server.
    assert not refused.failed
    assert refused.attributes["error.type"] == error
    assert refused.attributes["gen_ai.request.model"] == model


@in_one_loop
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json"),
        ({"response_format": {"type": "text"}}, "text"),
    ],
)
async def test_a_request_span_says_json_and_stop_sequences_where_they_were_asked_for(fleet, fields, told):
    trace_id, _ = await fleet.traced(**fields, stop=["zebra", "gnu"], max_tokens=4)
    spans = await fleet.collector.trace(trace_id, "text_completion tiny")
    request = spans["text_completion tiny"].attributes
    assert request["gen_ai.output.type"] == told
    assert request["gen_ai.request.stop_sequences"] == ["zebra", "gnu"]


@in_one_loop
async def test_what_is_not_sampled_leaves_nothing_and_has_the_same_text(fleet):
    _, unsampled = new_traceparent(sampled=False)
    answers = [await fleet.complete(), await fleet.complete(unsampled), await fleet.complete("not-a-traceparent")]
    trace_id, forced = await fleet.traced()
    await fleet.collector.trace(trace_id, "text_completion tiny", "verify")
    texts = {answer["choices"][0]["text"] for answer in (*answers, forced)}
    assert len(texts) == 1
    # What is recorded later is sent later: had any of these been, it would be here.
    assert not [span for span in fleet.collector.spans if span.trace_id in unsampled]
    # Every trace that came is one that a caller asked for: its first span has a parent.
    assert not [span for span in fleet.collector.spans if not span.parent_id]


async def test_a_request_without_a_context_begins_a_trace_at_the_ratio_of_the_gateway(tmp_path):
    async with running_collector() as (endpoint, collector):
        async with scripted_fleet(tmp_path, otlp_traces_endpoint=endpoint, trace_sample_ratio=1.0) as fleet:
            await fleet.openai.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                max_tokens=5,
                seed=1,
                extra_headers={"x-request-id": "mine"},
            )
        # Stopping sends what is left.
        spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"chat tiny", "placement"}
    assert spans["chat tiny"].parent_id == ""
    assert spans["chat tiny"].attributes["gen_ai.operation.name"] == "chat"
    assert spans["chat tiny"].attributes["paceline.request_id"] == "mine"


async def test_an_answer_that_calls_a_tool_says_so_in_its_span_whatever_the_api(tmp_path):
    parameters = {"type": "object", "properties": {}}
    asks = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        },
        "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": parameters}]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 200,
            "tools": [{"name": "f", "input_schema": parameters}],
        },
    }
    settings = {"tool_call_parser": "hermes", "trace_sample_ratio": 1.0}
    async with running_collector() as (endpoint, collector):
        async with scripted_fleet(tmp_path, otlp_traces_endpoint=endpoint, **settings) as fleet:
            text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
            tokens = fleet.codec.encode(text, field="text", special_tokens=False, context_len=1024)
            fleet.verifier.script = Script(tokens=(*tokens, 0), stop_after=len(tokens))
            for path, body in asks.items():
                answer = await fleet.http.post(path, json={"model": "tiny", **body})
                assert answer.status_code == 200, answer.text
        requests = [span for span in collector.spans if span.name == "chat tiny"]
    reasons = [span.attributes["gen_ai.response.finish_reasons"] for span in requests]
    assert reasons == [["tool_calls"]] * 3


async def test_a_failover_shows_as_a_second_placement_under_the_next_epoch(tmp_path):
    trace_id, traceparent = new_traceparent()
    async with running_collector() as (endpoint, collector):
        async with scripted_fleet(tmp_path, num_verifiers=2, otlp_traces_endpoint=endpoint) as fleet:
            for verifier in fleet.verifiers:
                verifier.script = Script(pause_after=3)
            call = generate(fleet, traceparent)
            stream = aiter(call)
            tokens = 0
            while tokens < 3:
                tokens += len((await anext(stream)).token_ids)
            (chosen,) = [index for index, verifier in enumerate(fleet.verifiers) if verifier.requests]
            fleet.verifiers[1 - chosen].script = Script()
            await fleet.servers[chosen].stop(0)
            tokens += sum([len(piece.token_ids) async for piece in stream])
        assert tokens == 10
        request, first, second = collector.of_trace(trace_id)
    assert (first.name, second.name) == ("placement", "placement")
    assert first.parent_id == second.parent_id == request.span_id
    assert first.failed
    assert not second.failed
    assert not request.failed
    assert second.attributes["paceline.epoch"] == first.attributes["paceline.epoch"] + 1
    assert second.attributes["paceline.num_committed_tokens"] == 3
    assert second.attributes["paceline.verifier"] != first.attributes["paceline.verifier"]


def generate(fleet: ScriptedFleet, traceparent: str = "") -> Any:
    sampling = common_pb2.SamplingParams(max_tokens=10, seed=0)
    message = gateway_pb2.GatewayGenerateRequest(model="tiny", prompt="x", sampling=sampling)
    return fleet.stub.Generate(message, metadata=(("traceparent", traceparent),) if traceparent else None)


async def test_a_resumed_session_goes_on_in_its_trace_at_another_gateway(tmp_path):
    trace_id, traceparent = new_traceparent()
    async with running_collector() as (endpoint, collector):
        async with scripted_fleet(tmp_path, otlp_traces_endpoint=endpoint) as fleet:
            fleet.verifier.script = Script(pause_after=6)
            call = generate(fleet, traceparent)
            stream = aiter(call)
            session_id = (await anext(stream)).session_id
            have = 0
            while have < 6:
                have += len((await anext(stream)).token_ids)
            call.cancel()
            fleet.verifier.script = Script()
            async with joining_gateway(fleet, otlp_traces_endpoint=endpoint) as address:
                rest = await resume(address, session_id, fleet.letter_ids(0, have))
        spans = collector.of_trace(trace_id)
    assert rest == 4
    first, second = [span for span in spans if span.name == "text_completion tiny"]
    assert first.attributes["paceline.cancelled"]
    assert not first.failed
    assert second.parent_id == first.span_id
    assert second.attributes["paceline.offset"] == 6
    placements = [span for span in spans if span.name == "placement"]
    assert [span.parent_id for span in placements] == [first.span_id, second.span_id]


async def resume(address: str, session_id: str, known: list[int]) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        message = gateway_pb2.ResumeRequest(session_id=session_id, offset=len(known), digest=token_digest(known))
        return sum([len(piece.token_ids) async for piece in gateway_pb2_grpc.GatewayStub(channel).Resume(message)])


async def test_a_dead_collector_changes_no_token_and_is_logged(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(otlp, "EXPORT_TIMEOUT_S", 0.2)
        async with scripted_fleet(tmp_path, otlp_traces_endpoint=dead, trace_sample_ratio=1.0) as fleet:
            pieces = [piece for _ in range(4) async for piece in generate(fleet)]
            text = "".join(piece.text for piece in pieces)
    assert text == 4 * fleet.letters(0, 10)
    complaints = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert complaints
    assert all("Failed to export traces" in record.getMessage() for record in complaints)


async def test_a_drafted_session_has_a_span_from_its_opening_to_the_next_or_to_its_end():
    _, traceparent = new_traceparent()
    opened = OpenSession(
        session_id="s",
        epoch=2,
        number=7,
        token_ids=(1, 2),
        prompt_len=2,
        sampling=SamplingParams(max_tokens=9),
        price=0.5,
        room=8,
        traceparent=traceparent,
    )
    commit = to_commits(Commit(7, 2, [3, 4], price=0.5, room=8))
    async with running_collector() as (endpoint, collector):
        async with traced(DRAFTER, endpoint) as tracer:
            drafts = DraftTraces(tracer)
            drafts.received(1, [opened, commit])
            drafts.sent(1, [to_drafts(SessionDrafts(7, 2, ()))])
            # Another session ends nothing, nor does another verifier's session of that number.
            drafts.received(1, [CloseSession(number=6)])
            drafts.received(2, [CloseSession(number=7), replace(opened, traceparent="")])
            drafts.received(1, [replace(opened, epoch=3)])
            drafts.received(1, [CloseSession(number=7)])
            drafts.received(1, [replace(opened, number=8, epoch=4)])
            drafts.closed(1)
    spans = sorted(collector.spans, key=lambda span: span.attributes["paceline.epoch"])
    assert [span.attributes["paceline.epoch"] for span in spans] == [2, 3, 4]
    assert [span.attributes["paceline.num_commits"] for span in spans] == [1, 0, 0]
    assert [span.attributes["paceline.max_lag_tokens"] for span in spans] == [2, 0, 0]
    assert {span.parent_id for span in spans} == {traceparent.split("-")[2]}


@pytest.mark.parametrize("endpoint", ["localhost", "ftp://x:1", "http://x:1/v1/traces", "http://x:port"])
async def test_an_endpoint_that_cannot_be_right_is_refused_by_name(endpoint):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        async with open_tracing(endpoint, 1.0, role="gateway", replica_id="g"):
            pass


def test_without_an_endpoint_nothing_that_records_or_sends_spans_is_imported():
    """The Redis client imports OpenTelemetry's metrics by itself where they are installed."""
    program = """
import asyncio, sys
import paceline.drafter.tracing, paceline.gateway.__main__, paceline.verifier.tracing
from paceline.obs.tracing import ended, open_tracing, start_span

async def main(endpoint):
    async with open_tracing(endpoint, 0.0, role="gateway", replica_id="g") as tracer:
        with ended(start_span(tracer, "x")) as span:
            span.set_attribute("a", 1)

recording = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "paceline.obs.otlp")
for endpoint in ("", "http://127.0.0.1:1"):
    asyncio.run(main(endpoint))
    print(any(name.startswith(recording) for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]
