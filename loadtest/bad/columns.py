"""Bad messages in columns, of all peers, to the engines behind the wire: in a process of its own, which must survive.

Verifier and drafter are the engines that serve, on simulated devices, and exchange real messages. Most of these are
changed on the way: numbers at the borders of 32 bits, ends that fall, wrap or reach too far, columns that are too short
or too long, entries by the hundred. Either a message is refused as a whole, and its stream begins anew, or the loops
take it. A gateway reads what a verifier answers in the same way.

`outcomes` runs this in a child, with the bounds of loops checked or compiled as they serve. Compiled loops check none:
what is wrong there ends the child, by a signal, or brings other outcomes than the checked loops have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from loadtest.core import DRAFTER, PROMPT_TOKENS, VOCAB_SIZE, Drafter, Models, Stopwatch, Verifier
from paceline.core.errors import PacelineError, RemoteProtocolError
from paceline.core.messages import GenerateRequest, PositionLogprobs, SessionEvent, SpeculationRecord, StepCommit
from paceline.core.params import REJECTION, SamplingParams, SpeculationParams
from paceline.core.target_events import DraftsArrived, LinkChanged, Submit
from paceline.engine.draft_scheduler import VerifierLeft, VerifierMessages
from paceline.engine.loop import run_sync
from paceline.rpc.v1 import drafter_pb2, verifier_pb2
from paceline.wire import (
    AskedSession,
    LogPart,
    draft_request_from_pb,
    draft_request_to_pb,
    draft_response_from_pb,
    draft_response_to_pb,
    in_parts,
    log_from_pb,
    log_to_pb,
)

SESSIONS, NODES = 4, 8
# Messages of a pair of engines: its sessions do not end within them.
MESSAGES = 200
ROOT = Path(__file__).parents[2]
REFUSED, TAKEN = "refused", "taken"
# A gateway's requests to a verifier in two sessions, and the beginning of the answer.
ASKED = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=8, logprobs=1),
    speculation=SpeculationParams(),
)
_JUDGED = PositionLogprobs(token_id=4, logprob=-0.5, top=((5, -0.25),))
_RECORD = SpeculationRecord(num_steps=2, num_spec_steps=1, acceptance_histogram=(0, 1), mean_batch_size=1.0)
_COMMIT = StepCommit(
    numbers=[1, 2],
    offsets=[0, 0],
    ends=[2, 3],
    tokens=[4, 4, 4],
    origins=bytearray(3),
    events={
        1: SessionEvent(logprobs=(_JUDGED, _JUDGED), speculation=_RECORD),
        2: SessionEvent(running=True),
    },
)
ANSWER = log_to_pb(LogPart(commit=_COMMIT, alive=True)).SerializeToString()
_BORDERS = (0, 1, 2, 3, 127, 1023, 1024, 2**16, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1)
# Changed parts of each peer's messages: its lists of submessages.
_LISTS = {"DraftResponse": ("drafts", "lagging"), "DraftRequest": ("commits", "opens", "states")}


def _words(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4]))


def _bytes(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


def _replaced(chance: random.Random, words: list[int]) -> list[int]:
    if words:
        at = chance.randrange(len(words))
        words[at] = chance.choice((*_BORDERS, len(words), words[at] + 1, max(0, words[at] - 1))) % 2**32
    return words


def _wrapping(chance: random.Random, words: list[int]) -> list[int]:
    """As int32 the differences of these are all above 0, and the last is what it was."""
    last = words[-1] if words else 0
    return [*words[:-3], *chance.choice(((2**31 - 1, 2**32 - 2), (2**31, 0), (2**32 - 1, 2**31 - 1))), last]


def _longer(chance: random.Random, words: list[int]) -> list[int]:
    return words + [chance.choice(_BORDERS)] * chance.choice((1, 2, 1100))


def _shorter(chance: random.Random, words: list[int]) -> list[int]:
    return words[: -chance.randint(1, 3)]


def _shuffled(chance: random.Random, words: list[int]) -> list[int]:
    chance.shuffle(words)
    return words


_CHANGES: Sequence[Callable[[random.Random, list[int]], list[int]]] = (
    _replaced, _replaced, _replaced, _wrapping, _longer, _shorter, _shuffled
)  # fmt: skip


def changed(message: Message, chance: random.Random) -> Message:
    """A message with some of its columns changed; those that must be as long as one another often stay so."""
    for _ in range(chance.randint(1, 3)):
        lists = [entries for name in _LISTS[message.DESCRIPTOR.name] if (entries := getattr(message, name))]
        if not lists:
            break
        entries = chance.choice(lists)
        if chance.random() < 0.05:
            entries.extend([entries[0]] * chance.choice((1, 2, 300)))
        _change(chance.choice(entries), chance)
    return message


def _change(entry: Message, chance: random.Random) -> None:
    fields = entry.DESCRIPTOR.fields
    columns = [each.name for each in fields if each.type == each.TYPE_BYTES and not each.is_repeated]
    numbers = [
        each.name for each in fields if each.type in (each.TYPE_UINT32, each.TYPE_UINT64) and not each.is_repeated
    ]
    if columns:
        name = chance.choice((*columns, "ends") if "ends" in columns else columns)
        data = getattr(entry, name)
        if chance.random() < 0.1:
            setattr(entry, name, data + chance.randbytes(chance.randint(1, 3)))
        else:
            setattr(entry, name, _bytes(chance.choice(_CHANGES)(chance, _words(data))))
    if numbers and (not columns or chance.random() < 0.5):
        setattr(entry, chance.choice(numbers), chance.choice(_BORDERS))
    if isinstance(entry, drafter_pb2.OpenSession) and chance.random() < 0.5:
        entry.token_ids.append(chance.choice(_BORDERS))
        entry.params.sampling.logit_bias.add(token_id=chance.choice(_BORDERS), bias=1.0)


class Peers:
    """A verifier and a drafter, and a wire between them that changes what it carries.

    Args:
        chance: Random source of the changes.
        counts: Outcomes of messages, by their kind.
    """

    def __init__(self, chance: random.Random, counts: Counter[str]) -> None:
        self._chance, self._counts = chance, counts
        models = Models.of(VOCAB_SIZE)
        self._verifier = Verifier(models, {"temperature": 0.0}, SESSIONS, NODES, Stopwatch()).engine
        self._drafter = Drafter(models, SESSIONS, NODES, Stopwatch()).engine
        self._link = 1
        for number, acceptance in ((101, REJECTION), (102, "")):
            sampling = SamplingParams(max_tokens=512, temperature=0.8, presence_penalty=0.1, ignore_eos=True)
            request = GenerateRequest(
                session_id=str(number),
                epoch=1,
                prompt_token_ids=(number,) * PROMPT_TOKENS,
                sampling=sampling,
                speculation=SpeculationParams(acceptance=acceptance),
            )
            self._verifier.handle(Submit(request=request, number=number, drafter_address=DRAFTER))

    def exchange(self) -> None:
        """Runs a step of each, and exchanges their messages."""
        output = run_sync(self._verifier.step())
        if output.broken_links:
            self._counts["drafts broken"] += 1
            self._redial()
        for part in in_parts(output.to_drafters.get(DRAFTER, [])):
            self._to_drafter(draft_request_to_pb(part))
        drafted = run_sync(self._drafter.step()) if self._drafter.has_work() else None
        if drafted is None:
            return
        if drafted.broken_links:
            self._counts["commits broken"] += 1
            self._redial()
        for drafts in in_parts(drafted.to_verifiers.get(self._link, [])):
            self._to_verifier(draft_response_to_pb(drafts))
        self._to_gateway()

    def _redial(self) -> None:
        self._drafter.handle(VerifierLeft(link=self._link))
        self._link += 1
        for up in (False, True):
            self._verifier.handle(LinkChanged(address=DRAFTER, up=up))

    def _sent(self, message: Message) -> bytes:
        if self._chance.random() < 0.3:
            return message.SerializeToString()
        return changed(message, self._chance).SerializeToString()

    def _to_drafter(self, message: drafter_pb2.DraftRequest) -> None:
        data = self._sent(message)
        try:
            _, messages = draft_request_from_pb(drafter_pb2.DraftRequest.FromString(data))
        except RemoteProtocolError:
            self._counts[f"commits {REFUSED}"] += 1
            self._redial()
            return
        self._counts[f"commits {TAKEN}"] += 1
        self._drafter.handle(VerifierMessages(link=self._link, messages=messages))

    def _to_verifier(self, message: drafter_pb2.DraftResponse) -> None:
        data = self._sent(message)
        try:
            _, messages = draft_response_from_pb(drafter_pb2.DraftResponse.FromString(data), SESSIONS + 2)
        except RemoteProtocolError:
            self._counts[f"drafts {REFUSED}"] += 1
            self._redial()
            return
        self._counts[f"drafts {TAKEN}"] += 1
        self._verifier.handle(DraftsArrived(address=DRAFTER, messages=messages, arrived_s=0.0))

    def _to_gateway(self) -> None:
        answer = verifier_pb2.VerifyResponse.FromString(ANSWER * self._chance.choice((1, 1, 2, 300)))
        for _ in range(self._chance.randint(0, 2)):
            _change(answer, self._chance)
        data = bytearray(answer.SerializeToString())
        for _ in range(self._chance.randint(0, 3)):
            data[self._chance.randrange(len(data))] = self._chance.randrange(256)
        sessions = {number: AskedSession(request=ASKED, vocab_size=VOCAB_SIZE) for number in (1, 2)}
        try:
            part = log_from_pb(verifier_pb2.VerifyResponse.FromString(bytes(data)), sessions, last_number=3)
        except (RemoteProtocolError, DecodeError):
            self._counts[f"answers {REFUSED}"] += 1
            return
        for *_, outcome in part:
            self._counts[f"answers {REFUSED if isinstance(outcome, PacelineError) else TAKEN}"] += 1


def sent(seed: int, count: int) -> Counter[str]:
    """Sends bad messages in this process; what became of them, by their kind."""
    chance, counts = random.Random(seed), Counter[str]()
    while counts.total() < count:
        peers, end = Peers(chance, counts), min(count, counts.total() + MESSAGES)
        while counts.total() < end:
            peers.exchange()
    return counts


async def outcomes(seed: int, count: int, *, checked: bool) -> dict[str, int] | str:
    """Sends bad messages in a child; what became of them, or how the child ended.

    Args:
        seed: Seed of the messages.
        count: How many, at least.
        checked: Loops check their bounds, which takes long; else they are those that serve.
    """
    environ = {name: value for name, value in os.environ.items() if name != "NUMBA_BOUNDSCHECK"}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({"NUMBA_BOUNDSCHECK": "1"} if checked else {})
    command = [sys.executable, "-m", __name__, "--seed", str(seed), "--messages", str(count)]
    child = await asyncio.create_subprocess_exec(
        *command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await child.communicate()
    if child.returncode:
        return f"ended with {child.returncode}: {err.decode(errors='replace')[-1000:]}"
    counts: dict[str, int] = json.loads(out)
    return counts


def main() -> None:
    """The child."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--messages", type=int, default=1000)
    arguments = parser.parse_args()
    print(json.dumps(dict(sorted(sent(arguments.seed, arguments.messages).items()))))


if __name__ == "__main__":
    main()
