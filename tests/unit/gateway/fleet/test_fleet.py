"""What the fleet looks like, what remains of it when the registry dies, and which verifiers a gateway can reach."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.core.errors import ConfigError, ModelNotFoundError, UnavailableError
from paceline.gateway.config import model_aliases
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.verifier_health import UNREACHABLE_S
from paceline.gateway.text.codec import TextCodec
from paceline.store.base import Replica
from tests.support import tiny_tokenizer
from tests.support.replicas import replica

CODEC = TextCodec(tiny_tokenizer.train(), None)


async def test_a_drafter_that_can_never_be_paired_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(replica("v"), replica("x", "drafter", vocab_hash="w"), replica("y", "drafter"))
    fleet = Fleet(registry, {"tiny": CODEC})
    for _ in range(2):
        await fleet.refresh()
    [record] = caplog.records
    assert "speaks the vocabulary of no verifier" in record.message
    assert vars(record)["replica_id"] == "x"


class Registry:
    """A registry in the test's hands."""

    def __init__(self, *replicas: Replica) -> None:
        self.found: list[Replica] | None = list(replicas)

    async def replicas(self, role: str | None = None) -> list[Replica]:
        if self.found is None:
            raise UnavailableError("the store at 127.0.0.1:6379 does not answer in time")
        return self.found


async def test_the_last_known_fleet_survives_a_dead_registry() -> None:
    registry = Registry(replica("a"), replica("b"))
    fleet = Fleet(registry, {"tiny": CODEC})
    await fleet.refresh()
    registry.found = None
    await fleet.refresh()
    assert fleet.model("tiny").context_len == 64
    assert fleet.store_error is not None
    assert "127.0.0.1:6379" in fleet.store_error
    registry.found = [replica("b", num_sessions=3)]
    await fleet.refresh()
    assert fleet.store_error is None
    assert [(each.replica_id, each.num_sessions) for each in fleet.replicas] == [("b", 3)]


async def test_a_model_that_cannot_be_served_is_refused_with_the_reason() -> None:
    fleet = Fleet(Registry(replica("a", model="other")), {"tiny": CODEC})
    await fleet.refresh()
    with pytest.raises(ModelNotFoundError, match="served: tiny"):
        fleet.model("other")
    with pytest.raises(UnavailableError, match="no verifier of model 'tiny'"):
        fleet.model("tiny")
    with pytest.raises(ModelNotFoundError):
        Fleet(Registry(replica("a")), {"tiny": CODEC, "other": CODEC}).model("")
    registry = Registry(replica("v", vocab_hash="theirs"))
    fleet = Fleet(registry, {"tiny": TextCodec(tiny_tokenizer.train(), None, "ours")})
    await fleet.refresh()
    with pytest.raises(UnavailableError, match="tokenizer is not the verifier's"):
        fleet.model("tiny")


async def test_a_model_answers_to_further_names_and_is_one_all_the_same() -> None:
    fleet = Fleet(Registry(replica("a")), {"tiny": CODEC}, aliases={"gpt": "tiny"})
    await fleet.refresh()
    assert (fleet.model_names, fleet.own_names) == (["gpt", "tiny"], ["tiny"])
    by_alias, by_name, unnamed = fleet.model("gpt"), fleet.model("tiny"), fleet.model("")
    assert [each.shown_name for each in (by_alias, by_name, unnamed)] == ["gpt", "tiny", "tiny"]
    assert {each.identity.name for each in (by_alias, by_name, unnamed)} == {"tiny"}
    assert fleet.identity("gpt") == fleet.identity("tiny")


def test_further_names_mean_one_model_each() -> None:
    assert model_aliases(["a", "b"], ["tiny"]) == {"a": "tiny", "b": "tiny"}
    assert model_aliases(["a=one", "b=two"], ["one", "two"]) == {"a": "one", "b": "two"}
    with pytest.raises(ConfigError, match="=one"):
        model_aliases(["=one"], ["one"])
    for given in (["a"], ["a=three"], ["a=one", "a=two"], ["two=one"]):
        with pytest.raises(ConfigError, match=given[-1]):
            model_aliases(given, ["one", "two"])


async def test_only_verifiers_whose_calls_were_lost_are_asked_and_an_answer_clears_them() -> None:
    serving: set[str] = set()
    asked: list[str] = []

    async def answers(each: Replica) -> bool:
        asked.append(each.replica_id)
        return each.replica_id in serving

    time = SimpleNamespace(now_s=100.0)
    fleet = Fleet(Registry(replica("a"), replica("b")), {"tiny": CODEC}, answers, clock=lambda: time.now_s)
    await fleet.refresh()
    fleet.health.lost("a")
    time.now_s += UNREACHABLE_S
    await fleet.refresh()
    assert (asked, fleet.health.any_reachable(fleet.replicas[:1])) == (["a"], False)
    serving.add("a")
    await fleet.refresh()
    assert fleet.health.any_reachable(fleet.replicas[:1])
    await fleet.refresh()
    assert asked == ["a", "a"]
