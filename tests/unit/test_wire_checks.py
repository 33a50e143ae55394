"""What a peer leaves out takes its default or is refused by name, and so is what it malforms."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline import wire
from paceline.core.errors import InvalidRequestError, RemoteProtocolError
from paceline.core.messages import GenerateRequest, ModelIdentity, OpenSession
from paceline.core.params import SAMPLING, SamplingParams, SpeculationParams
from paceline.forest.records import SLOTS
from paceline.rpc.v1 import common_pb2, drafter_pb2, verifier_pb2
from paceline.wire.common import PROTOCOL
from paceline.wire.drafts import MAX_NODES
from paceline.wire.sessions import Received
from tests.support.steps import Step, heard

TRACEPARENT = f"00-{7:032x}-{9:016x}-01"
IDENTITY = ModelIdentity(name="m", vocab_hash="v", vocab_size=9, context_len=9)
REQUEST = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=3),
    speculation=SpeculationParams(),
)


@pytest.mark.parametrize("field", ["session_id", "prompt_token_ids", "sampling"])
def test_a_generate_request_without_a_needed_field_is_refused_by_name(field: str) -> None:
    message = wire.start_session_to_pb(1, REQUEST)
    of: Any = message.params if field == "sampling" else message
    of.ClearField(field)
    with pytest.raises(InvalidRequestError) as caught:
        wire.generate_request_from_pb(message)
    assert caught.value.field == field


def test_a_session_id_beyond_256_characters_is_refused() -> None:
    message = wire.start_session_to_pb(1, replace(REQUEST, session_id="x" * 257))
    with pytest.raises(InvalidRequestError, match="session_id: has 257 characters, at most 256 are allowed"):
        wire.generate_request_from_pb(message)


def test_a_generate_request_without_speculation_takes_the_defaults() -> None:
    message = wire.start_session_to_pb(1, replace(REQUEST, speculation=SpeculationParams(enabled=False)))
    message.params.ClearField("speculation")
    assert wire.generate_request_from_pb(message).speculation == SpeculationParams()


def test_sampling_fields_left_at_zero_by_a_client_are_off() -> None:
    params = wire.sampling_from_pb(common_pb2.SamplingParams(max_tokens=4))
    assert params == SamplingParams(max_tokens=4, temperature=0.0)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("max_tokens", SamplingParams(max_tokens=2**32)),
        ("top_k", SamplingParams(max_tokens=1, top_k=2**32)),
        ("stop_token_ids", SamplingParams(max_tokens=1, stop_token_ids=(-1,))),
        ("allowed_token_ids", SamplingParams(max_tokens=1, allowed_token_ids=(-1,))),
        ("logit_bias", SamplingParams(max_tokens=1, logit_bias=((-1, 1.0),))),
    ],
)
def test_numbers_too_large_for_the_wire_are_refused_by_field(field: str, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wire.sampling_to_pb(params)
    assert caught.value.field == field


def draft_response(**columns: bytes) -> drafter_pb2.DraftResponse:
    whole = {
        "sessions": word(1),
        "base_lens": word(1),
        "ends": word(1),
        "node_ids": word(1),
        "parent_ids": word(0),
        "token_ids": word(7),
        "confidences": b"\x09",
    }
    return drafter_pb2.DraftResponse(drafts=[drafter_pb2.Drafts(**(whole | columns))])


def word(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


@pytest.mark.parametrize(
    ("field", "column"),
    [
        ("sessions", b"\x01\x00\x00"),
        ("base_lens", b""),
        ("ends", word(2)),
        ("ends", word(0)),
        ("ends", word(1, 1)),
        ("parent_ids", b""),
        ("token_ids", word(1, 2)),
        ("confidences", b""),
        ("node_ids", word(0)),
        ("node_ids", b"\x01"),
    ],
)
def test_malformed_columns_are_refused_by_field(field: str, column: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"Drafts\.{field}"):
        wire.draft_response_from_pb(draft_response(**{field: column}))


def draft_request(**columns: bytes) -> drafter_pb2.DraftRequest:
    whole = {
        "sessions": word(1),
        "base_lens": word(1),
        "ends": word(1),
        "token_ids": word(7),
        "prices": struct.pack("<f", 0.5),
        "rooms": word(4),
    }
    return drafter_pb2.DraftRequest(commits=[drafter_pb2.Commits(**(whole | columns))])


@pytest.mark.parametrize(
    ("field", "columns"),
    [
        ("sessions", {"sessions": b"\x01"}),
        ("sessions", {name: word(1, 1) for name in ("sessions", "base_lens", "rooms")} | {"ends": word(0, 1)}),
        ("base_lens", {"base_lens": b""}),
        ("ends", {"ends": word(2)}),
        ("ends", {"ends": b""}),
        ("token_ids", {"token_ids": b"\x07\x00"}),
        ("prices", {"prices": b""}),
        ("prices", {"prices": struct.pack("<f", 1.5)}),
        ("prices", {"prices": struct.pack("<f", float("nan"))}),
        ("rooms", {"rooms": word(1, 2)}),
    ],
)
def test_malformed_columns_of_commits_are_refused_by_field(field: str, columns: dict[str, bytes]) -> None:
    wire.draft_request_from_pb(draft_request())
    with pytest.raises(RemoteProtocolError, match=rf"Commits\.{field}"):
        wire.draft_request_from_pb(draft_request(**columns))


def test_a_session_is_named_once_in_a_message() -> None:
    """Each session that looks at its guesses is merged alone: many names of one would cost the square of them."""
    message = draft_response(sessions=word(1, 1), base_lens=word(1, 1), ends=word(0, 1))
    with pytest.raises(RemoteProtocolError, match=r"Drafts\.sessions: names a session twice"):
        wire.draft_response_from_pb(message)


FALLING = [(1, 0, 1), (2**31 + 1, 0, 1), (2**31 - 1, 2**32 - 2, 1), (2**31, 0, 1), (0, 2**32 - 1, 1)]


@pytest.mark.parametrize("ends", FALLING)
def test_ends_that_fall_are_refused_however_far_apart_they_are(ends: tuple[int, ...]) -> None:
    """Audit 3, a01: as int32 the differences of the third were 2^31 - 1, 2^31 - 1 and 3, and a loop read outside."""
    columns = {"sessions": word(1, 2, 3), "base_lens": word(1, 1, 1), "ends": word(*ends)}
    with pytest.raises(RemoteProtocolError, match=r"Drafts\.ends: must"):
        wire.draft_response_from_pb(draft_response(**columns))
    columns |= {"prices": struct.pack("<3f", 0, 0, 0), "rooms": word(4, 4, 4)}
    with pytest.raises(RemoteProtocolError, match=r"Commits\.ends: must"):
        wire.draft_request_from_pb(draft_request(**columns))


@pytest.mark.parametrize("field", ["sessions", "base_lens", "node_ids", "parent_ids", "token_ids"])
def test_numbers_that_compiled_loops_would_take_for_negative_ones_are_refused(field: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"Drafts\.{field}: must be from \d to 2147483647, got 2147483648"):
        wire.draft_response_from_pb(draft_response(**{field: word(2**31)}))


@pytest.mark.parametrize("field", ["sessions", "base_lens", "token_ids", "rooms"])
def test_numbers_of_commits_that_do_not_fit_are_refused(field: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"Commits\.{field}: must be from \d to 2147483647, got 4294967295"):
        wire.draft_request_from_pb(draft_request(**{field: word(2**32 - 1)}))


def test_a_session_that_the_drafter_was_never_told_of_is_refused() -> None:
    wire.draft_response_from_pb(draft_response(sessions=word(4)), last_number=4)
    with pytest.raises(RemoteProtocolError, match=r"Drafts\.sessions: must be from 1 to 4, got 5"):
        wire.draft_response_from_pb(draft_response(sessions=word(5)), last_number=4)


def test_a_session_has_at_most_the_nodes_that_a_tree_holds() -> None:
    assert MAX_NODES == SLOTS
    nodes, confidences = word(*range(1, SLOTS + 2)), bytes(SLOTS + 1)
    columns = {"node_ids": nodes, "parent_ids": nodes, "token_ids": nodes, "confidences": confidences}
    with pytest.raises(RemoteProtocolError, match=r"Drafts\.node_ids: a session: has 1025 entries, at most 1024"):
        wire.draft_response_from_pb(draft_response(ends=word(SLOTS + 1), **columns))


def test_a_peer_of_another_version_is_refused_and_both_versions_are_named() -> None:
    hello = wire.draft_response_to_pb((), IDENTITY)
    hello.protocol = 0
    with pytest.raises(RemoteProtocolError, match=f"the drafter speaks version 1 and we speak {PROTOCOL}"):
        wire.draft_response_from_pb(hello)
    request = wire.draft_request_to_pb((), IDENTITY)
    request.protocol = PROTOCOL + 1
    with pytest.raises(RemoteProtocolError, match=f"the verifier speaks version {PROTOCOL + 1}"):
        wire.draft_request_from_pb(request)


def test_a_distribution_is_wanted_for_every_node_or_for_none() -> None:
    message = draft_response(
        ends=word(2), node_ids=word(1, 2), parent_ids=word(0, 1), token_ids=word(7, 7), confidences=b"\x09\x09"
    )
    message.drafts[0].distributions.add(token_ids=[7], weights=[1])
    with pytest.raises(RemoteProtocolError, match=r"Drafts\.distributions: has 1 entries, where 2 are expected"):
        wire.draft_response_from_pb(message)


@pytest.mark.parametrize(
    ("token_ids", "weights", "problem"),
    [
        ([], [], "token_ids: must have from 1 to 64 entries, got 0"),
        (list(range(65)), [1] * 65, "token_ids: must have from 1 to 64 entries, got 65"),
        ([7, 8], [1], "weights: has 1 entries, token_ids has 2"),
        ([7, 8, 7], [1, 1, 1], "token_ids: names a token twice"),
        ([8, 9], [1, 1], "token_ids: the guess 7 is not among them"),
        ([7, 8], [1, 0], "weights: must be from 1 to 65535, got 0 to 1"),
        ([7, 8], [1, 65536], "weights: must be from 1 to 65535, got 1 to 65536"),
    ],
)
def test_a_malformed_distribution_is_refused_by_field(token_ids: list[int], weights: list[int], problem: str) -> None:
    message = draft_response()
    message.drafts[0].distributions.add(token_ids=token_ids, weights=weights)
    with pytest.raises(RemoteProtocolError, match=f"SparseDraft.{problem}"):
        wire.draft_response_from_pb(message)


FINE = common_pb2.SamplingParams(max_tokens=1)
BAD = common_pb2.SamplingParams(max_tokens=1, temperature=-1.0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"params": None}, "params.sampling"),
        ({"params": {"sampling": BAD}}, "params.temperature"),
        ({"prompt_len": 3}, "prompt_len"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"number": 0}, "number"),
        ({"number": 2**31}, "number"),
        ({"price": float("nan")}, "price"),
        ({"price": 1.5}, "price"),
        ({"params": {"sampling": FINE, "speculation": {"acceptance": "lucky"}}}, "params.speculation.acceptance"),
        ({"params": {"sampling": FINE, "cache_salt": "x" * 129}}, "params.cache_salt"),
        ({"traceparent": "01"}, "traceparent"),
        ({"traceparent": TRACEPARENT + "\n"}, "traceparent"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
    ],
)
def test_a_malformed_open_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    fine = {
        "session_id": "s",
        "epoch": 1,
        "number": 1,
        "token_ids": [1, 2],
        "prompt_len": 2,
        "params": {"sampling": FINE},
        "price": 0.5,
    }
    request = drafter_pb2.DraftRequest(opens=[drafter_pb2.OpenSession(**fine | changes)])
    with pytest.raises(RemoteProtocolError, match=re.escape(f"OpenSession.{field}")):
        wire.draft_request_from_pb(request)


def test_an_identity_without_vocabulary_is_refused() -> None:
    request = drafter_pb2.DraftRequest(target=common_pb2.ModelIdentity(name="demo"), protocol=PROTOCOL)
    with pytest.raises(RemoteProtocolError, match=r"ModelIdentity\.vocab_hash"):
        wire.draft_request_from_pb(request)


def test_a_verifiers_address_is_bounded_and_older_ones_have_none() -> None:
    longest = "v" * 259
    assert wire.verifier_from_pb(drafter_pb2.DraftRequest(verifier=longest)) == longest
    assert wire.verifier_from_pb(drafter_pb2.DraftRequest()) == ""
    with pytest.raises(RemoteProtocolError, match=r"DraftRequest\.verifier"):
        wire.verifier_from_pb(drafter_pb2.DraftRequest(verifier=longest + "v"))


ASKED = replace(REQUEST, sampling=SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1))


def judged(*token_ids: int, logprob: float = -0.5) -> common_pb2.PositionLogprobs:
    first, *top = (common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id in token_ids)
    return common_pb2.PositionLogprobs(chosen=first, top=top)


def log(**fields: Any) -> verifier_pb2.VerifyResponse:
    """Two tokens of session 1 and one of session 2, with other values for some fields."""
    values = {
        "sessions": word(1, 2),
        "offsets": word(0, 0),
        "ends": word(2, 3),
        "token_ids": word(4, 5, 6),
        "origins": bytes(3),
    }
    return verifier_pb2.VerifyResponse(**{**values, **fields})


def read_log(
    message: verifier_pb2.VerifyResponse, request: GenerateRequest = REQUEST, num_generated: int = 0
) -> Iterator[Received]:
    sessions = {number: wire.AskedSession(request=request, vocab_size=9) for number in (1, 2)}
    sessions[1].num_generated = num_generated
    return wire.log_from_pb(message, sessions, last_number=3)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sessions": word(1)}, "offsets: has 2 entries, where 1 are expected|ends: has 2 entries, where 1"),
        ({"sessions": word(1, 1)}, "sessions: names a session twice"),
        ({"sessions": word(1, 4)}, "sessions: must be from 1 to 3, got 4"),
        ({"sessions": word(0, 1)}, "sessions: must be from 1 to 3, got 0"),
        ({"offsets": word(0)}, "offsets: has 1 entries, where 2 are expected"),
        ({"offsets": word(2**31, 0)}, "offsets: must be from 0 to 2147483647, got 2147483648"),
        ({"ends": word(3, 2)}, "ends: must grow, up to the 3 entries of token_ids"),
        ({"ends": word(2, 4)}, "ends: must grow, up to the 3 entries of token_ids"),
        ({"ends": word(2**32 - 1, 3)}, "ends: must be from 0 to 2147483647"),
        ({"token_ids": word(4, 5)}, "ends: must grow, up to the 2 entries of token_ids"),
        ({"token_ids": b"123"}, "token_ids: must hold numbers of 4 bytes, got 3 bytes"),
        ({"origins": bytes(2)}, "origins: has 2 entries, where 3 are expected"),
        ({"running": [3]}, "running: names sessions twice, or others than `sessions` does"),
        ({"lossy": [1, 1]}, "lossy: names sessions twice"),
        ({"taken": [1] * 65_537}, "taken: has 65537 entries, at most 65536 are allowed"),
        ({"running": [1] * 65_537}, "running: has 65537 entries, at most 65536 are allowed"),
        ({"lossy": [1] * 65_537}, "lossy: has 65537 entries, at most 65536 are allowed"),
        ({"results": [verifier_pb2.SessionResult()] * 3}, "results: has 3 entries, at most 2 are allowed"),
        ({"records": [verifier_pb2.SessionSpeculation()] * 3}, "records: has 3 entries, at most 2 are allowed"),
        ({"logprobs": [verifier_pb2.SessionLogprobs()] * 3}, "logprobs: has 3 entries, at most 2 are allowed"),
        ({"results": [verifier_pb2.SessionResult(number=3)]}, "results: names sessions twice, or others"),
        ({"records": [verifier_pb2.SessionSpeculation()]}, "records: names sessions twice, or others"),
        ({"logprobs": [verifier_pb2.SessionLogprobs(number=9)]}, "logprobs: names sessions twice, or others"),
    ],
)
def test_columns_of_a_log_that_contradict_each_other_end_the_stream(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"VerifyResponse\.({problem})"):
        read_log(log(**fields))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"origins": bytes((77, 1, 0))}, "VerifyResponse.origins: got 77"),
        ({"origins": bytes((0, 1, 0))}, "VerifyResponse.origins: got 0"),
        ({"results": [verifier_pb2.SessionResult(number=1)]}, "SessionResult.finish_reason: got 0"),
        ({"token_ids": word(4, 9, 6)}, "VerifyResponse.token_ids: 9 is outside the vocabulary of 9"),
        ({"offsets": word(1, 0)}, "VerifyResponse.offsets: must be 0, the number of tokens received, got 1"),
        (
            {"logprobs": [verifier_pb2.SessionLogprobs(number=1, logprobs=[judged(4)])]},
            "SessionLogprobs.logprobs: has 1 entries for 2 tokens",
        ),
        (
            {"logprobs": [verifier_pb2.SessionLogprobs(number=1, logprobs=[judged(4), judged(5)])]},
            "SessionLogprobs.logprobs: were not asked for",
        ),
    ],
)
def test_what_is_wrong_with_one_session_ends_it_alone(fields: dict[str, Any], problem: str) -> None:
    (_, error), (number, committed) = heard(read_log(log(**fields)))
    assert isinstance(error, RemoteProtocolError)
    assert str(error) == problem
    assert (number, committed.token_ids) == (2, (6,))


@pytest.mark.parametrize(
    ("token_ids", "answer", "problem"),
    [
        ((4, 4), {}, "token_ids: has 2 entries, at most 1 are allowed"),
        ((4,), {"logprobs": [judged(4, 5, 6)]}, "logprobs.top: has 2 entries, at most 1 are allowed"),
        ((4,), {"logprobs": [judged(4, 9)]}, "logprobs: 9 is outside the vocabulary of 9"),
        ((4,), {"logprobs": [judged(4, logprob=float("nan"))]}, "logprobs: the log probability of 4 is no number"),
        ((), {"prompt_logprobs": [judged(4), judged(4)]}, "prompt_logprobs: has 2 entries, at most 1 are allowed"),
        (
            (),
            {"prompt_logprobs": [judged(2**32 - 1)], "prompt_offset": 1},
            "prompt_logprobs: 4294967295 is outside the vocabulary of 9",
        ),
        ((), {"prompt_logprobs": [judged(4)]}, "prompt_offset: must be 1, got 0"),
        ((4,), {"logprobs": [judged(4)]}, "prompt_logprobs: 0 came of 1 tokens"),
    ],
)
def test_a_verifier_is_held_to_what_it_was_asked_for(
    token_ids: tuple[int, ...], answer: dict[str, Any], problem: str
) -> None:
    """Audit 3, a18: what a verifier sent beyond `max_tokens` was passed on, without end."""
    message = log(
        sessions=word(1),
        offsets=word(2),
        ends=word(len(token_ids)),
        token_ids=word(*token_ids),
        origins=bytes(len(token_ids)),
        logprobs=[verifier_pb2.SessionLogprobs(number=1, **answer)],
    )
    [(_, error)] = heard(read_log(message, ASKED, num_generated=2))
    assert problem in str(error)
    [(_, error)] = heard(read_log(message, num_generated=3))
    assert isinstance(error, RemoteProtocolError)


def test_what_a_verifier_was_asked_for_passes() -> None:
    prompt = verifier_pb2.SessionLogprobs(number=1, prompt_logprobs=[judged(2, 3)], prompt_offset=1)
    both = verifier_pb2.SessionLogprobs(number=1, logprobs=[judged(4, 5), judged(5, 6)])
    prompt.logprobs.extend(both.logprobs)
    (_, committed), _ = heard(read_log(log(logprobs=[prompt]), ASKED))
    assert committed.token_ids == (4, 5)
    assert [len(each) for each in (committed.logprobs, committed.prompt_logprobs)] == [2, 1]


def test_log_probabilities_of_a_long_prompt_are_read_in_parts_when_they_are_asked_for() -> None:
    """A part took 90 ms of the gateway's event loop, in one turn."""
    request = replace(ASKED, prompt_token_ids=(1,) * 301)
    prompt = verifier_pb2.SessionLogprobs(number=1, prompt_logprobs=[judged(2, 3)] * 300, prompt_offset=1)
    prompt.logprobs.extend([judged(4, 5), judged(5, 6)])
    prompt.prompt_logprobs[290].chosen.token_id = 9
    outcomes = heard(read_log(log(logprobs=[prompt]), request))
    first, second = next(outcomes)[1], next(outcomes)[1]
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    assert (first.prompt_offset, second.prompt_offset) == (1, 129)
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == 128
    assert first.token_ids == second.token_ids == ()
    _, error = next(outcomes)
    assert "prompt_logprobs: 9 is outside the vocabulary of 9" in str(error)
    prompt.prompt_logprobs[290].chosen.token_id = 2
    *_, (_, last), _ = heard(read_log(log(logprobs=[prompt]), request))
    assert isinstance(last, Step)
    assert (last.prompt_offset, len(last.prompt_logprobs), last.token_ids) == (257, 44, (4, 5))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"acceptance_histogram": [1] * 66}, r"acceptance_histogram: has 66 entries, at most 65 are allowed"),
        ({"mean_batch_size": float("nan")}, r"mean_batch_size: got nan"),
        ({"mean_batch_size": float("inf")}, r"mean_batch_size: got inf"),
        ({"mean_batch_size": -1.0}, r"mean_batch_size: got -1"),
    ],
)
def test_a_record_of_what_cannot_have_been_is_refused(record: dict[str, Any], problem: str) -> None:
    """Audit 3, a18: a histogram of 300,000 places stayed in the gateway's metrics for good."""
    with pytest.raises(RemoteProtocolError, match=f"SpeculationRecord.{problem}"):
        wire.speculation_record_from_pb(common_pb2.SpeculationRecord(**record))
    told = verifier_pb2.SessionSpeculation(number=1, speculation=common_pb2.SpeculationRecord(**record))
    (_, error), _ = heard(read_log(log(records=[told])))
    assert re.search(f"SpeculationRecord.{problem}", str(error))


@pytest.mark.parametrize("field", ["eos_token_ids", "methods", "acceptance_rules"])
def test_a_model_of_endless_lists_is_refused(field: str) -> None:
    names: dict[str, Any] = {field: [1] * 65 if field == "eos_token_ids" else ["x"] * 65}
    message = common_pb2.ModelIdentity(name="m", vocab_hash="v", vocab_size=9, **names)
    with pytest.raises(RemoteProtocolError, match=f"ModelIdentity.{field}: has 65 entries, at most 64 are allowed"):
        wire.identity_from_pb(message)


@pytest.mark.parametrize(("field", "most"), [(name, row.most) for name, row in SAMPLING.items() if row.default == ()])
def test_entries_of_sampling_parameters_are_counted_before_anything_is_made_of_them(field: str, most: int) -> None:
    """16 MiB hold 8 million entries of two bytes."""
    message = common_pb2.SamplingParams(max_tokens=1)
    for _ in range(most + 1):
        entries = getattr(message, field)
        entries.append(1) if field.endswith("ids") else entries.add()
    with pytest.raises(InvalidRequestError, match=f"{field}: has {most + 1} entries, at most {most} are allowed"):
        wire.sampling_from_pb(message)


def test_a_text_beyond_the_context_is_refused_before_its_tokens_are_made() -> None:
    message = wire.start_session_to_pb(1, REQUEST)
    message.prompt_token_ids.extend([2**32 - 1] * 100)
    with pytest.raises(InvalidRequestError, match="prompt_token_ids: 102 tokens exceed the context of 64"):
        wire.generate_request_from_pb(message, context_len=64)


def test_of_a_session_beyond_a_drafters_context_no_more_tokens_are_made_than_show_that() -> None:
    opened = drafter_pb2.OpenSession(
        session_id="s", number=1, token_ids=[7] * 100, prompt_len=50, params={"sampling": FINE}
    )
    _, [session] = wire.draft_request_from_pb(drafter_pb2.DraftRequest(opens=[opened]), context_len=64)
    assert isinstance(session, OpenSession)
    assert len(session.token_ids) == 65


def test_a_message_has_at_most_the_distributions_of_a_part() -> None:
    """Audit 3, a13: 800,000 distributions in one message."""
    message = draft_response()
    for _ in range(1025):
        message.drafts[0].distributions.add()
    with pytest.raises(RemoteProtocolError, match="DraftResponse: distributions: has 1025 entries, at most 1024"):
        wire.draft_response_from_pb(message)


@pytest.mark.parametrize("kind", ["starts", "leaves"])
def test_a_gateways_message_starts_and_leaves_a_bounded_number_of_sessions(kind: str) -> None:
    message = verifier_pb2.VerifyRequest()
    for _ in range(257):
        entries: Any = getattr(message, kind)
        entries.append(1) if kind == "leaves" else entries.add()
    with pytest.raises(RemoteProtocolError, match="VerifyRequest: has 257 entries, at most 256 are allowed"):
        wire.starts_from_pb(message)


@pytest.mark.parametrize("kind", ["opens", "closes", "states", "commits"])
def test_a_message_holds_at_most_as_many_as_a_part(kind: str) -> None:
    """Audit 3, a13: 4 million entries of four bytes each kept an event loop busy for seconds."""
    message = drafter_pb2.DraftRequest()
    for _ in range(257):
        entries: Any = getattr(message, kind)
        entries.append(1) if kind == "closes" else entries.add()
    with pytest.raises(RemoteProtocolError, match="DraftRequest: has 257 entries, at most 256 are allowed"):
        wire.draft_request_from_pb(message)
