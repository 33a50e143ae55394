"""The text of a session does not depend on how speculation grouped its tokens into steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.messages import ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.requests import ServedModel, SessionRequest
from paceline.gateway.text import TextCodec
from paceline.gateway.text_stream import TextStream
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


def run(token_ids: list[int], sizes: list[int], stops: list[str], min_tokens: int = 0) -> tuple[str, int]:
    """Returns text and number of tokens of an answer whose steps have these sizes, then size 1."""
    sampling = SamplingParams(max_tokens=64, min_tokens=min_tokens)
    request = SessionRequest(
        model=MODEL,
        session_id="s",
        prompt_token_ids=(5,),
        sampling=sampling,
        speculation=SpeculationParams(),
        stops=tuple(stops),
    )
    stream, text, num_tokens, at = TextStream(request), "", 0, 0
    for size in [*sizes, *[1] * len(token_ids)]:
        fed = stream.feed(token_ids[at : at + size])
        text, num_tokens, at = text + fed.text, num_tokens + fed.num_tokens, at + size
        if fed.stopped:
            return text, num_tokens
    return text + stream.finish().text, num_tokens


@given(token_ids=TOKEN_IDS, sizes=st.lists(st.integers(1, 9), max_size=9), stops=STOPS)
def test_text_and_number_of_tokens_do_not_depend_on_the_steps(
    token_ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    assert run(token_ids, sizes, stops) == run(token_ids, [], stops)
    assert run(token_ids, sizes, stops, min_tokens=5) == run(token_ids, [], stops, min_tokens=5)


@given(token_ids=TOKEN_IDS)
def test_without_stop_strings_the_text_is_that_of_the_tokens(token_ids: list[int]) -> None:
    assert run([*token_ids, EOS], [], []) == (CODEC.decode(token_ids), len(token_ids) + 1)
