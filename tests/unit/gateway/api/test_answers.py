"""What answers say of tokens and of calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.messages import FinishReason, PositionLogprobs
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.api.anthropic.answer import MessageAnswer
from paceline.gateway.api.openai.answer import CompletionAnswer
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.message.growing import Message
from paceline.gateway.message.reader import CallArguments, CallBegin
from paceline.gateway.sessions.output import Ending, Piece
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.text.codec import TextCodec
from tests.support import tiny_tokenizer
from tests.support.scripted_fleet import EOS, identity


@pytest.mark.parametrize("step_len", [1, 2, 99])
def test_offsets_of_tokens_that_share_a_character_point_to_its_beginning(tmp_path: Path, step_len: int) -> None:
    codec = TextCodec.from_folder(tiny_tokenizer.save_folder(tmp_path))
    byte_of = {codec.token_bytes(token_id): token_id for token_id in range(codec.vocab_size)}
    text = "a😀bé"
    ids = [byte_of[bytes([byte])] for byte in text.encode()]
    # A special token in the midst stands in no text.
    ids.insert(5, EOS)
    request = SessionRequest(
        model=ServedModel(identity=identity(codec), codec=codec),
        session_id="s",
        prompt_token_ids=(5,),
        sampling=SamplingParams(max_tokens=99),
        speculation=SpeculationParams(),
    )
    answer = CompletionAnswer(
        chat=False, request_id="r", created_s=0, model_name="m", requests=[request], samples_per_prompt=1
    )
    chunks, offsets = [], list[int]()
    for at in range(0, len(ids), step_len):
        logprobs = tuple(PositionLogprobs(token_id=each, logprob=-1.0, top=()) for each in ids[at : at + step_len])
        chunk = answer.piece_chunk(0, Piece(token_ids=tuple(ids[at : at + step_len]), logprobs=logprobs))
        assert chunk is not None
        chunks.append(chunk)
    # A long chunk is written late.
    for chunk in reversed(chunks):
        offsets[:0] = chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 1, 2, 2, 3, 3]
    assert [text[offset] for offset in offsets] == list("a😀😀😀😀bbéé")


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": 1', "[1]"])
def test_arguments_that_are_no_object_of_json_leave_the_answer_one(arguments: str) -> None:
    message = Message(None, "session")
    answer = MessageAnswer("msg_1", "m", 3, message)
    answer.further(message.take([CallBegin("f"), CallArguments(arguments)]))
    answer.ending(Ending(finish_reason=FinishReason.STOP, num_prompt_tokens=3, num_generated_tokens=1))
    [block] = answer.whole()["content"]
    assert block["input"] == {"INVALID_JSON": arguments}
    assert json.dumps(answer.whole(), allow_nan=False)
