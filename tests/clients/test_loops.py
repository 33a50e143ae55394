"""Agents on four families of models: every loop ends with the right answer, whether tokens are drafted or not.

The families' templates make the demands that make agents fail elsewhere: one system message at the beginning, turns
that alternate, ids of nine characters, arguments as mappings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import conversation as said
import pytest
from loops.frameworks import FRAMEWORKS
from loops.programs import PROGRAMS
from loops.run import LONG, Agent, Run, Turn
from loops.smol import SMOL_AGENTS
from pydantic import BaseModel, ConfigDict

from conftest import Tools, served_by

FAMILIES = ("hermes", "mistral", "llama3_json", "qwen3_coder")
AGENTS = {**FRAMEWORKS, **PROGRAMS}
# Fewer than the tokens of the answer, more than those of the thought before it.
CUT = 40
CUTS = range(10, 70, 10)
on_every_family = pytest.mark.parametrize("family", FAMILIES)
whole_and_streamed = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@dataclass(frozen=True, kw_only=True)
class FailingTools(Tools):
    """Tools of which one fails at first."""

    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        total = super().add(a, b)
        if self.calls.count(self.calls[-1]) == 1:
            raise ValueError("busy, try again")
        return total

    def update_plan(self, plan: list[str]) -> str:
        """Takes a plan."""
        self.calls.append(f"update_plan({plan})")
        return "taken"


class Place(BaseModel):
    """What an answer is parsed as."""

    model_config = ConfigDict(extra="forbid")

    city: str
    degrees: int


@pytest.fixture
def run(family, streamed):
    """A run without a question."""
    return Run(served=served_by(family), tools=FailingTools(), streamed=streamed, speculation=True, question="")


def converse(agent: Agent, run: Run, cut: int) -> list[str]:
    """Asks three questions, each where the one before ended; the second gets an answer of so many tokens at most."""
    answers: list[str] = []
    turn = Turn(answer="", history="")
    for question, fields in ((said.WARM, {}), (said.WHY, {"max_tokens": cut}), (said.AGAIN, {})):
        turn = agent(replace(run, question=question, history=turn.history, **fields))
        answers.append(turn.answer)
    return answers


def with_and_without_drafts(run: Run, ask: Any) -> Any:
    """What comes with speculation, which is what comes without."""
    outcomes = []
    for speculation in (True, False):
        tools = FailingTools()
        outcomes.append((ask(replace(run, speculation=speculation, tools=tools)), tools.calls))
    (drafted, _), (plain, _) = outcomes
    assert drafted == plain
    return outcomes[0]


@on_every_family
@whole_and_streamed
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_comes_to_its_answer_past_a_failing_tool_and_a_cut_answer(name, run) -> None:
    takes_no_cut_answer = run.streamed and name == "openai-agents, responses"
    max_tokens = LONG if takes_no_cut_answer else CUT
    (first, cut, last), calls = with_and_without_drafts(run, lambda run: converse(AGENTS[name], run, max_tokens))
    assert (first, last) == (said.WARM_ANSWER, said.AGAIN_ANSWER)
    # A client may run calls of one turn beside one another.
    assert calls[: len(said.WARM_CALLS)] == said.WARM_CALLS
    assert sorted(calls[len(said.WARM_CALLS) :]) == sorted(said.AGAIN_CALLS)
    assert said.WHY_ANSWER.startswith(cut.strip())
    assert cut
    assert takes_no_cut_answer or len(cut) < len(said.WHY_ANSWER)


@on_every_family
@whole_and_streamed
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_answer_of_a_type_comes_after_calls(name, run) -> None:
    asked = replace(run, question=said.OBJECT, answer_type=Place)
    answer, calls = with_and_without_drafts(asked, lambda run: FRAMEWORKS[name](run).answer)
    assert Place.model_validate_json(answer) == Place.model_validate_json(said.OBJECT_ANSWER)
    assert calls == said.OBJECT_CALLS


@on_every_family
@whole_and_streamed
@pytest.mark.parametrize("question", SMOL_AGENTS)
def test_an_agent_that_only_calls_or_writes_code_comes_to_its_answer(question, run) -> None:
    answer, calls = with_and_without_drafts(replace(run, question=question), SMOL_AGENTS[question])
    assert (answer, calls) == (said.WARM_ANSWER, said.WARM_CALLS)


@on_every_family
@whole_and_streamed
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_that_was_cut_off_is_made_again(name, run) -> None:
    """The history has its broken arguments then, and an error as its result."""
    numbers_of_calls = set()
    for max_tokens in CUTS:
        tools = FailingTools()
        turn = PROGRAMS[name](replace(run, question=said.PLAN, max_tokens=max_tokens, tools=tools))
        assert not tools.calls or turn.answer == said.PLAN_ANSWER
        numbers_of_calls.add(len(tools.calls))
    # Without one the answer was cut before its call began; with two it was not cut.
    assert 1 in numbers_of_calls
