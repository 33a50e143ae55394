"""Which verifiers a gateway can reach, as its own calls and their health show."""

from __future__ import annotations

from types import SimpleNamespace

from paceline.gateway.fleet.fleet import UNREACHABLE_S, Reach
from paceline.store.base import Replica
from tests.support.replicas import replica

FLEET = [replica("a"), replica("b")]


class Verifiers:
    """Those that answer when they are asked for their health, and who was asked."""

    def __init__(self) -> None:
        self.serving: set[str] = set()
        self.asked: list[str] = []

    async def answers(self, each: Replica) -> bool:
        self.asked.append(each.replica_id)
        return each.replica_id in self.serving


async def test_verifiers_are_out_of_reach_once_all_have_been_lost_for_a_while() -> None:
    time, verifiers = SimpleNamespace(now_s=100.0), Verifiers()
    reach = Reach(verifiers.answers, lambda: time.now_s)
    for each in FLEET:
        reach.lost(each.replica_id)
    assert reach.any_of(FLEET)
    time.now_s += UNREACHABLE_S
    # A later loss is no new beginning.
    reach.lost("a")
    assert not reach.any_of(FLEET)
    reach.heard("b")
    assert reach.any_of(FLEET)
    assert not reach.any_of(FLEET[:1])


async def test_only_suspects_are_asked_and_an_answer_clears_them() -> None:
    time, verifiers = SimpleNamespace(now_s=100.0), Verifiers()
    reach = Reach(verifiers.answers, lambda: time.now_s)
    await reach.ask(FLEET)
    assert verifiers.asked == []
    reach.lost("a")
    time.now_s += UNREACHABLE_S
    await reach.ask(FLEET)
    assert (verifiers.asked, reach.any_of(FLEET[:1])) == (["a"], False)
    verifiers.serving.add("a")
    await reach.ask(FLEET)
    assert reach.any_of(FLEET[:1])
    reach.lost("b")
    time.now_s += UNREACHABLE_S
    # One that has left is forgotten.
    await reach.ask(FLEET[:1])
    assert reach.any_of(FLEET[1:])
