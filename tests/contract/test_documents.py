"""Documents that are kept for callers, in memory and on real servers: ranks and room."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis

from paceline.core.errors import UnavailableError
from paceline.store.base import FINAL, OVERHEAD_BYTES, Document, Keeping, Store
from paceline.store.redis import PREFIX, RedisStore
from tests.support.memory_store import MemoryStore

ROOM = 10 * (OVERHEAD_BYTES + 1000)


@pytest.fixture(params=["memory", "server"])
def documents(request: pytest.FixtureRequest, store: RedisStore) -> Store:
    return store if request.param == "server" else MemoryStore()


def document(name: str, keeper: str = "alice", rank: int = 0, body: bytes = b"x" * 1000) -> Document:
    return Document(keeper=keeper, name=name, body=body, rank=rank)


async def keep(documents: Store, each: Document, ttl_s: float = 60, *, replaces: bool = False) -> Keeping:
    return await documents.keep(each, ttl_s=ttl_s, room_bytes=ROOM, replaces=replaces)


async def names(documents: Store, keeper: str, number: int = 20) -> list[int]:
    """The numbers of those that are still there."""
    return [at for at in range(number) if await documents.kept(keeper, f"d{at}") is not None]


async def test_a_document_is_its_keepers_alone(documents: Store) -> None:
    assert await documents.kept("alice", "d") is None
    assert await keep(documents, document("d", body=b"\x00first")) is Keeping.DONE
    assert await documents.kept("alice", "d") == document("d", body=b"\x00first")
    assert await documents.kept("bob", "d") is None
    assert not await documents.forget("bob", "d")
    assert await documents.forget("alice", "d")
    assert not await documents.forget("alice", "d")
    assert await documents.kept("alice", "d") is None


async def test_only_a_higher_rank_takes_the_place_of_a_document(documents: Store) -> None:
    assert await keep(documents, document("d", rank=2), replaces=True) is Keeping.MISSING
    assert await keep(documents, document("d", rank=2)) is Keeping.DONE
    for rank in (1, 2):
        assert await keep(documents, document("d", rank=rank, body=b"late")) is Keeping.OUTRANKED
    assert await keep(documents, document("d", rank=FINAL, body=b"end"), replaces=True) is Keeping.DONE
    assert await keep(documents, document("d", rank=FINAL, body=b"other end")) is Keeping.OUTRANKED
    found = await documents.kept("alice", "d")
    assert found is not None
    assert (found.body, found.rank) == (b"end", FINAL)
    await documents.forget("alice", "d")
    # What is deleted does not come back with its end.
    assert await keep(documents, document("d", rank=FINAL), replaces=True) is Keeping.MISSING


async def test_a_document_ends_and_gives_its_room_back(documents: Store) -> None:
    await keep(documents, document("d0", body=b"x" * 4000), ttl_s=0.02)
    await asyncio.sleep(0.05)
    assert await names(documents, "alice", 1) == []
    for at in range(1, 11):
        await keep(documents, document(f"d{at}"))
    assert await names(documents, "alice") == list(range(1, 11))


async def test_a_keeper_alone_has_all_the_room_and_then_loses_its_oldest(documents: Store) -> None:
    for at in range(13):
        assert await keep(documents, document(f"d{at}")) is Keeping.DONE
    assert await names(documents, "alice") == list(range(3, 13))
    assert await keep(documents, document("d", body=bytes(ROOM))) is Keeping.TOO_LARGE
    assert await names(documents, "alice") == list(range(3, 13))


async def test_whoever_keeps_most_loses_and_nobody_else(documents: Store) -> None:
    """The second audit: twenty requests of one key drove out what another had kept."""
    await keep(documents, document("d0", "bob"))
    await keep(documents, document("d1", "carol"))
    for at in range(40):
        await keep(documents, document(f"d{at}", "greedy"))
    assert await names(documents, "bob") == [0]
    assert await names(documents, "carol") == [1]
    assert await names(documents, "greedy", 40) == list(range(32, 40))
    # Whoever asks later gets an equal share.
    for at in range(2, 12):
        await keep(documents, document(f"d{at}", "bob"))
    assert await names(documents, "carol") == [1]
    kept = [len(await names(documents, keeper, 40)) for keeper in ("bob", "greedy")]
    assert sum(kept) == 9
    assert min(kept) >= 4


async def test_what_is_written_again_counts_once(documents: Store) -> None:
    for rank in range(30):
        assert await keep(documents, document("d1", rank=rank)) is Keeping.DONE
    for at in range(2, 11):
        await keep(documents, document(f"d{at}"))
    assert await names(documents, "alice") == list(range(1, 11))


async def test_memory_and_server_agree_and_the_index_adds_up(server: Redis, store: RedisStore) -> None:
    chance, memory = random.Random(0), MemoryStore()
    for _ in range(200):
        keeper, name = chance.choice("abc"), f"d{chance.randrange(8)}"
        if chance.random() < 0.1:
            assert await memory.forget(keeper, name) == await store.forget(keeper, name)
            continue
        each = document(name, keeper, chance.randrange(40), bytes(chance.randrange(6000)))
        replaces = chance.random() < 0.2
        outcomes = {await keep(documents, each, replaces=replaces) for documents in (memory, store)}
        assert len(outcomes) == 1
        # The server orders by milliseconds.
        await asyncio.sleep(0.002)
    sizes = {}
    for keeper in "abc":
        for at in range(8):
            found = await memory.kept(keeper, f"d{at}")
            assert found == await store.kept(keeper, f"d{at}")
            if found is not None:
                sizes[f"{keeper}:d{at}".encode()] = found.size
    assert {name: int(size) for name, size in (await server.hgetall(f"{PREFIX}sizes")).items()} == sizes
    assert int(await server.get(f"{PREFIX}total")) == sum(sizes.values()) <= ROOM
    held = await server.zrange(f"{PREFIX}held", 0, -1, withscores=True)
    assert sum(size for _, size in held) == sum(sizes.values())


async def test_a_full_server_keeps_nothing_new_and_loses_nothing(server: Redis, store: RedisStore) -> None:
    for at in range(10):
        await keep(store, document(f"d{at}"))
    await server.config_set("maxmemory", 1)
    with pytest.raises(UnavailableError, match="is full"):
        await keep(store, document("d10"))
    assert await names(store, "alice") == list(range(10))
    assert await store.forget("alice", "d0")


@pytest.mark.parametrize("rank", ["", "first", "-1", "1e400", "99999999999999999999999", "\u0665"])
async def test_a_document_whose_rank_cannot_be_read_is_none_and_can_be_kept_anew(store: RedisStore, rank: str) -> None:
    """Audit 4, b07: reading it raised, and the task of a verifier that rehearses ended and began again for ever."""
    await keep(store, document("d", rank=1))
    await store._client.hset(f"{PREFIX}body:alice:d", "rank", rank)
    assert await store.kept("alice", "d") is None
    await store.forget("alice", "d")
    assert await keep(store, document("d", rank=2)) is Keeping.DONE
    assert await store.kept("alice", "d") == document("d", rank=2)
