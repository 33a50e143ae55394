"""The messages of the bench `fuzz`, a few of each kind, to services without processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from loadtest.bad.doors import send_all
from loadtest.bad.kinds import Target, bad_messages
from loadtest.fuzz import HTTP_DOORS, KINDS, Tally, fuzz, open_doors

from tests.integration.conftest import running_drafter, verifier_at
from tests.support.fuzzing import until
from tests.support.scripted_fleet import CONTEXT_LEN, scripted_fleet

pytestmark = pytest.mark.full

A_FEW = 4


async def test_bad_messages_of_every_kind_get_the_statuses_that_are_right_for_them(tiny_pair, tmp_path: Path) -> None:
    async with (
        scripted_fleet(tmp_path, trust_request_chat_template=True) as fleet,
        verifier_at(tiny_pair[0]) as (verifier, target_host),
        running_drafter(tiny_pair[1]) as (drafter, draft_host),
    ):
        target = Target(
            vocab_hash=draft_host.identity.vocab_hash, vocab_size=fleet.codec.vocab_size, context_len=CONTEXT_LEN
        )
        addresses = {"gateway": fleet.addresses.grpc, "verifier": verifier, "drafter": drafter}
        addresses |= dict.fromkeys(HTTP_DOORS, fleet.addresses.http)
        tally = Tally()
        with open_doors(addresses) as doors:
            for door, kinds in KINDS.items():
                few = (bad for kind in kinds for bad in bad_messages([kind], target, 1, A_FEW))
                await send_all(doors[door], few, lambda bad, status, door=door: tally.take(door, bad, status))
        assert not tally.wrong
        assert {key: sum(counts.values()) for key, counts in tally.counts.items()} == {
            (door, kind.name): A_FEW for door, kinds in KINDS.items() for kind in kinds
        }
        mixed = await fuzz(addresses, target, 2, 200)
        assert (mixed.num_answers, mixed.wrong) == (200, {})
        await until(lambda: target_host.num_sessions == 0 and draft_host.num_sessions == 0)
        assert (await fleet.http.get("/health")).json()["sessions"] == 0


def test_the_same_seed_sends_the_same_messages_and_another_one_others() -> None:
    target = Target(vocab_hash="a", vocab_size=300, context_len=64)
    for kinds in KINDS.values():
        first, again, other = ([bad.parts for bad in bad_messages(kinds, target, seed, 50)] for seed in (1, 1, 2))
        assert first == again
        assert first != other
