"""The text of a session does not depend on how speculation grouped its tokens into steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.messages import ModelIdentity, TokenOrigin
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.message.form import HERMES, QWEN3, MessageForm
from paceline.gateway.message.reader import CallArguments, CallBegin, Content, Part, Reasoning, content_of, joined
from paceline.gateway.sessions.answer import OutputStream
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.text.codec import TextCodec
from paceline.gateway.text.streaming import TokenText
from tests.support import tiny_tokenizer

EOS = 1
CODEC = TextCodec(tiny_tokenizer.train(), None)
MODEL = ServedModel(
    identity=ModelIdentity(
        name="tiny", vocab_hash="v", vocab_size=CODEC.vocab_size, context_len=64, eos_token_ids=(EOS,)
    ),
    codec=CODEC,
)
TOKEN_IDS = st.lists(st.integers(2, CODEC.vocab_size - 1) | st.integers(66, 70), max_size=25)
STOPS = st.lists(st.text(alphabet="abcde the", min_size=1, max_size=3), max_size=2)


def started(
    stops: list[str],
    *,
    min_tokens: int = 0,
    token_origins: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    form: MessageForm | None = None,
    **of_text: bool,
) -> OutputStream:
    sampling = SamplingParams(max_tokens=64, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
    request = SessionRequest(
        model=MODEL,
        session_id="s",
        prompt_token_ids=(5,),
        sampling=sampling,
        speculation=SpeculationParams(),
        stops=tuple(stops),
        token_origins=token_origins,
        form=form,
        **of_text,
    )
    return OutputStream(request)


def run(token_ids: list[int], sizes: list[int], stops: list[str], min_tokens: int = 0) -> tuple[str, int]:
    """Returns text and number of tokens of an answer whose steps have these sizes, then size 1."""
    stream, text, num_tokens, at = started(stops, min_tokens=min_tokens), "", 0, 0
    for size in [*sizes, *[1] * len(token_ids)]:
        fed = stream.feed(token_ids[at : at + size])
        text, num_tokens, at = text + content_of(fed.parts), num_tokens + fed.num_tokens, at + size
        if fed.stopped:
            return text, num_tokens
    return text + content_of(stream.finish().parts), num_tokens


@given(token_ids=TOKEN_IDS, sizes=st.lists(st.integers(1, 9), max_size=9), stops=STOPS)
def test_text_and_number_of_tokens_do_not_depend_on_the_steps(
    token_ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    assert run(token_ids, sizes, stops) == run(token_ids, [], stops)
    assert run(token_ids, sizes, stops, min_tokens=5) == run(token_ids, [], stops, min_tokens=5)


@given(token_ids=TOKEN_IDS)
def test_without_stop_strings_the_text_is_that_of_the_tokens(token_ids: list[int]) -> None:
    assert run([*token_ids, EOS], [], []) == (CODEC.decode(token_ids), len(token_ids) + 1)


def with_origins(
    token_ids: list[int], sizes: list[int], stops: list[str], min_tokens: int
) -> tuple[str, list[TokenText], int]:
    """Returns text, tokens with their origins, and number of tokens of the same answer if it asks for origins."""
    origins = bytes([list(TokenOrigin)[token_id % 4] for token_id in token_ids])
    stream, at = started(stops, min_tokens=min_tokens, token_origins=True), 0
    text, tokens, num_tokens = "", [], 0
    for size in [*sizes, *[1] * len(token_ids)]:
        fed = stream.feed(token_ids[at : at + size], origins[at : at + size])
        assert "".join(token.text for token in fed.tokens) == content_of(fed.parts)
        text, num_tokens, at = text + content_of(fed.parts), num_tokens + fed.num_tokens, at + size
        tokens += fed.tokens
        if fed.stopped:
            return text, tokens, num_tokens
    rest = stream.finish()
    return text + content_of(rest.parts), [*tokens, *rest.tokens], num_tokens


@given(
    token_ids=TOKEN_IDS,
    sizes=st.lists(st.integers(1, 9), max_size=9),
    stops=STOPS,
    min_tokens=st.sampled_from([0, 5]),
)
def test_origins_are_one_a_token_in_order_and_their_texts_join_to_the_same_text(
    token_ids: list[int], sizes: list[int], stops: list[str], min_tokens: int
) -> None:
    text, tokens, num_tokens = with_origins(token_ids, sizes, stops, min_tokens)
    assert (text, num_tokens) == run(token_ids, sizes, stops, min_tokens)
    assert "".join(token.text for token in tokens) == text
    assert [token.origin for token in tokens] == [list(TokenOrigin)[each % 4] for each in token_ids[:num_tokens]]


def spelled(text: str) -> list[int]:
    """Tokens of one byte each."""
    ids = {CODEC.token_bytes(token_id): token_id for token_id in reversed(range(CODEC.vocab_size))}
    return [ids[bytes([byte])] for byte in text.encode()]


def test_the_stop_string_is_part_of_the_text_where_it_is_asked_for() -> None:
    stream = started(["cd"], include_stop_str_in_output=True, token_origins=True)
    fed = [stream.feed([token_id], bytes([TokenOrigin.PLAIN])) for token_id in spelled("abcd")]
    assert ("".join(content_of(each.parts) for each in fed), fed[-1].stopped) == ("abcd", True)
    assert [token.text for each in fed for token in each.tokens] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_has_text_where_it_is_asked_for(include: bool, text: str) -> None:
    token_ids = spelled("abc")
    stream = started([], stop_token_ids=(token_ids[-1],), include_stop_str_in_output=include)
    assert content_of(stream.feed(token_ids).parts) + content_of(stream.finish().parts) == text


def test_special_tokens_are_spelled_out_where_they_are_asked_for_but_the_last() -> None:
    token_ids = [*spelled("a"), 0, *spelled("b"), EOS]
    for skipped, ending, text in (
        (True, False, "ab"),
        (False, False, "a<|begin|>b"),
        (False, True, "a<|begin|>b<|end|>"),
    ):
        stream = started([], skip_special_tokens=skipped, include_stop_str_in_output=ending)
        assert content_of(stream.feed(token_ids).parts) + content_of(stream.finish().parts) == text


def test_a_character_belongs_to_the_last_of_its_tokens_and_those_of_a_stop_string_have_no_text() -> None:
    face = spelled("a\U0001f600b")
    for token_ids, stops, texts in (
        (face, [], ["a", "", "", "", "\U0001f600", "b"]),
        (face[:-2], [], ["a", "", "", "\ufffd"]),
        (spelled("abcde"), ["cd"], ["a", "b", "", ""]),
    ):
        _, tokens, _ = with_origins(token_ids, [], stops, 0)
        assert [token.text for token in tokens] == texts


THOUGHT_AND_CALL = (
    '<think>\nmaybe END of it\n</think>\n\nI see.<tool_call>{"name": "f", "arguments": {"a": "END"}}</tool_call>'
)
CALLING = MessageForm(reasoning=QWEN3, tool_calls=HERMES)


def message(text: str, sizes: list[int], stops: list[str], **more: bool) -> tuple[list[Part], int, str | None]:
    """Returns the parts of a message whose steps have these sizes, the number of its tokens, and what stopped it."""
    stream, token_ids, at = started(stops, form=CALLING, **more), spelled(text), 0
    parts: list[Part] = []
    num_tokens = 0
    for size in [*sizes, *[1] * len(token_ids)]:
        fed = stream.feed(token_ids[at : at + size])
        parts, num_tokens, at = [*parts, *fed.parts], num_tokens + fed.num_tokens, at + size
        if fed.stopped:
            break
    else:
        parts += stream.finish().parts
    return joined([*parts, *stream.end_of_message()]), num_tokens, stream._reader.stop


@given(sizes=st.lists(st.integers(1, 40), max_size=9), include=st.booleans())
def test_stop_strings_end_content_and_neither_reasoning_nor_a_call(sizes: list[int], include: bool) -> None:
    """vLLM #53066: the text of a stop string in the thought, and in the arguments of a call."""
    whole = [Reasoning("maybe END of it"), Content("I see."), CallBegin("f"), CallArguments('{"a": "END"}')]
    assert message(THOUGHT_AND_CALL, sizes, ["END"], include_stop_str_in_output=include) == (
        whole,
        len(spelled(THOUGHT_AND_CALL)),
        None,
    )
    text = f"{THOUGHT_AND_CALL}so END and more"
    ended = [*whole, Content("so END" if include else "so ")]
    num_tokens = len(spelled(text)) - len(" and more")
    assert message(text, sizes, ["END"], include_stop_str_in_output=include) == (ended, num_tokens, "END")


def test_a_stop_string_that_only_the_end_makes_certain_ends_the_message() -> None:
    parts, _, stop = message("a\n\n", [], ["\n"])
    assert (parts, stop) == ([Content("a")], "\n")


@pytest.mark.parametrize("min_tokens", range(12))
def test_a_stop_string_across_min_tokens_ends_the_text(min_tokens: int) -> None:
    """vLLM #22014: a stop string that begins before `min_tokens` and ends at them or later."""
    token_ids = spelled("0123END78END9")
    stops = 7 if min_tokens <= 7 else 12
    for size in (1, 3, 13):
        text, num_tokens = run(token_ids, [size] * 13, ["END"], min_tokens)
        assert (text, num_tokens) == ("0123" if stops == 7 else "0123END78", stops)
