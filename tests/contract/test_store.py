"""One contract for every store: in memory, on Valkey, and on Redis where the system has one."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from paceline.cluster.valkey import find_server, server_command
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import ModelIdentity
from paceline.store.base import (
    EPOCHS_PER_OWNER,
    MAX_EPOCH,
    AdvanceSession,
    LoggedSession,
    PutSession,
    Replica,
    SessionRecord,
    SessionState,
    Store,
    Written,
)
from paceline.store.redis import REPLICA_INDEX, REPLICA_PREFIX, URL_OPTIONS, RedisStore, open_store
from tests.support.memory_store import MemoryStore
from tools.ports import free_port, listens

HOST = "127.0.0.1"
IDENTITY = ModelIdentity(name="demo", vocab_hash="abc", vocab_size=4096, context_len=1024, eos_token_ids=(0, 3))
VERIFIER = Replica(
    replica_id="v1",
    role="verifier",
    address="127.0.0.1:8101",
    identity=IDENTITY,
    max_sessions=16,
    metrics_address="127.0.0.1:8102",
)
DRAFTER = Replica(replica_id="d1", role="drafter", address="127.0.0.1:8201", identity=IDENTITY)
GATEWAY = Replica(replica_id="g1", role="gateway", address="127.0.0.1:8001")
SESSION = SessionRecord(
    session_id="s1",
    epoch=5,
    owner="g1",
    model="demo",
    verifier_id="v1",
    prompt_len=3,
    committed_len=0,
    state=SessionState.RUNNING,
    params_json='{"temperature": 0.8}',
)
PROMPT = (7, 2**32 - 1, 0)


@contextmanager
def server_process(
    program: Path, data_dir: Path, port: int | None = None
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port(HOST) if port is None else port
    command = server_command(program, host=HOST, port=port, data_dir=data_dir)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not listens(HOST, port):
            assert process.poll() is None
        yield port, process
    finally:
        process.kill()
        process.wait()


def servers() -> list[str]:
    names = ["valkey"]
    if shutil.which("redis-server"):
        names.append("redis-server")
    return names


@pytest.fixture(scope="module", params=["memory", *servers()])
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "memory":
        yield "memory://"
        return
    program = find_server(None if request.param == "valkey" else Path(request.param))
    with server_process(program, tmp_path_factory.mktemp("data")) as (port, _):
        yield f"redis://{HOST}:{port}/0"


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    opened: MemoryStore | RedisStore = MemoryStore() if store_url == "memory://" else RedisStore(store_url)
    yield opened
    await opened.close()
    if store_url.startswith("redis"):
        # The next test has the same server.
        async with Redis.from_url(store_url) as client:
            await client.flushdb()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - the server's clock gives no event
            await asyncio.sleep(0.01)


async def test_an_announced_replica_is_found_as_it_was(store: Store) -> None:
    await store.announce(VERIFIER, ttl_s=60)
    assert await store.replicas() == [VERIFIER]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewerIdentity(ModelIdentity):
    """As a later version may announce it."""

    rope_scaling: str = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewerReplica(Replica):
    """As a later version may announce it."""

    zone: str = "eu-1"
    peers: tuple[str, ...] = ("v2",)


async def test_a_newer_replica_is_found_by_what_is_known_of_it(store: Store) -> None:
    identity = NewerIdentity(**asdict(IDENTITY))
    said = {**{field.name: getattr(VERIFIER, field.name) for field in fields(VERIFIER)}, "identity": identity}
    await store.announce(NewerReplica(**said), ttl_s=60)
    [found] = await store.replicas()
    assert known(found) == known(VERIFIER)


def known(replica: Replica) -> dict[str, object]:
    values = {field.name: getattr(replica, field.name) for field in fields(Replica)}
    assert replica.identity is not None
    values["identity"] = {field.name: getattr(replica.identity, field.name) for field in fields(ModelIdentity)}
    return values


async def test_an_older_replica_that_says_nothing_of_metrics_is_found(store_url: str, store: Store) -> None:
    if store_url.startswith("memory:"):
        pytest.skip("no bytes of an older version lie in memory")
    entry = {"replica_id": "old", "role": "drafter", "address": "h:1", "identity": None}
    async with Redis.from_url(store_url) as client:
        await client.set(f"{REPLICA_PREFIX}old", json.dumps(entry), px=60_000)
        await client.sadd(REPLICA_INDEX, "old")
    assert await store.replicas() == [Replica(replica_id="old", role="drafter", address="h:1")]


async def test_replicas_are_listed_by_role_and_sorted_by_id(store: Store) -> None:
    for replica in (GATEWAY, VERIFIER, DRAFTER, replace(VERIFIER, replica_id="v0")):
        await store.announce(replica, ttl_s=60)
    assert [replica.replica_id for replica in await store.replicas()] == ["d1", "g1", "v0", "v1"]
    assert [replica.replica_id for replica in await store.replicas("verifier")] == ["v0", "v1"]
    assert await store.replicas("nobody") == []


async def test_announcing_again_replaces_what_was_said(store: Store) -> None:
    await store.announce(VERIFIER, ttl_s=60)
    busy = replace(VERIFIER, num_sessions=7, draining=True)
    await store.announce(busy, ttl_s=60)
    assert await store.replicas() == [busy]


async def test_a_withdrawn_replica_is_gone_at_once(store: Store) -> None:
    await store.announce(VERIFIER, ttl_s=60)
    await store.withdraw("v1")
    await store.withdraw("never there")
    assert await store.replicas() == []


async def test_a_silent_replica_is_forgotten_and_may_come_back(store: Store) -> None:
    await store.announce(VERIFIER, ttl_s=0.05)
    await store.announce(DRAFTER, ttl_s=60)

    async def only_the_drafter() -> bool:
        return await store.replicas() == [DRAFTER]

    await eventually(only_the_drafter)
    await store.announce(VERIFIER, ttl_s=60)
    assert await store.replicas() == [DRAFTER, VERIFIER]


async def put(store: Store, record: SessionRecord = SESSION, ttl_s: float = 60) -> Written:
    log = (*PROMPT, *range(record.committed_len))
    return (await store.write_sessions([PutSession(record=record, token_ids=log, ttl_s=ttl_s)]))[0]


async def advance(
    store: Store,
    epoch: int,
    token_ids: tuple[int, ...],
    state: SessionState = SessionState.RUNNING,
    base_len: int = 3,
    owner: str = "g1",
) -> Written:
    write = AdvanceSession(
        session_id="s1", epoch=epoch, owner=owner, base_len=base_len, token_ids=token_ids, state=state
    )
    return (await store.write_sessions([write]))[0]


async def test_a_session_record_comes_back_as_it_was_with_its_log(store: Store) -> None:
    assert await store.session("s1") is None
    assert await put(store) is Written.DONE
    assert await store.session("s1") == LoggedSession(record=SESSION, token_ids=PROMPT)


async def test_a_newer_epoch_may_replace_a_record_and_an_older_one_may_not(store: Store) -> None:
    newer = replace(SESSION, epoch=10, verifier_id="v2")
    assert await put(store) is Written.DONE
    assert await put(store, newer) is Written.DONE
    assert await put(store, replace(SESSION, epoch=9)) is Written.TAKEN_OVER
    assert await store.session("s1") == LoggedSession(record=newer, token_ids=PROMPT)


async def test_the_owner_advances_its_session(store: Store) -> None:
    await put(store)
    assert await advance(store, 5, (40, 41)) is Written.DONE
    assert await advance(store, 6, (42,), SessionState.STOP, base_len=5) is Written.DONE
    record = replace(SESSION, epoch=6, committed_len=3, state=SessionState.STOP)
    assert await store.session("s1") == LoggedSession(record=record, token_ids=(*PROMPT, 40, 41, 42))


async def test_tokens_written_twice_are_in_the_log_once(store: Store) -> None:
    await put(store)
    await advance(store, 5, (40, 41, 42))
    assert await advance(store, 5, (41,), base_len=4) is Written.DONE
    logged = await store.session("s1")
    assert logged is not None
    assert (logged.token_ids, logged.record.committed_len) == ((*PROMPT, 40, 41, 42), 3)


async def test_a_log_with_a_gap_is_not_written(store: Store) -> None:
    await put(store)
    assert await advance(store, 5, (40,), base_len=4) is Written.MISSING
    assert await store.session("s1") == LoggedSession(record=SESSION, token_ids=PROMPT)


async def test_many_writes_go_in_order_and_each_has_its_own_answer(store: Store) -> None:
    moves = [
        PutSession(record=SESSION, token_ids=PROMPT, ttl_s=60),
        AdvanceSession(session_id="s1", epoch=5, owner="g1", base_len=3, token_ids=(1,), state=SessionState.RUNNING),
        AdvanceSession(session_id="s2", epoch=5, owner="g1", base_len=3, token_ids=(1,), state=SessionState.RUNNING),
        AdvanceSession(session_id="s1", epoch=4, owner="g1", base_len=4, token_ids=(2,), state=SessionState.RUNNING),
        AdvanceSession(session_id="s1", epoch=5, owner="g1", base_len=4, token_ids=(3,), state=SessionState.LENGTH),
    ]
    answers = await store.write_sessions(moves)
    assert answers == [Written.DONE, Written.DONE, Written.MISSING, Written.TAKEN_OVER, Written.DONE]
    logged = await store.session("s1")
    assert logged is not None
    assert logged.token_ids == (*PROMPT, 1, 3)
    assert await store.write_sessions([]) == []


async def test_an_owner_that_was_replaced_is_told_so_and_changes_nothing(store: Store) -> None:
    owned = replace(SESSION, epoch=10)
    await put(store, owned)
    assert await advance(store, 9, (1,), SessionState.STOP) is Written.TAKEN_OVER
    assert await store.session("s1") == LoggedSession(record=owned, token_ids=PROMPT)


async def test_the_last_epochs_are_told_apart(store: Store) -> None:
    last = MAX_EPOCH + 1 - EPOCHS_PER_OWNER
    await put(store, replace(SESSION, epoch=last - 1))
    assert await advance(store, last - 1, (1,), owner="g2") is Written.TAKEN_OVER
    claimed = await store.claim_session("s1", "g2")
    assert claimed is not None
    assert claimed.record.epoch == last
    assert await advance(store, MAX_EPOCH, (1,), owner="g2") is Written.DONE
    assert await advance(store, MAX_EPOCH - 1, (1,), owner="g2") is Written.TAKEN_OVER


async def test_a_claim_gives_the_log_and_an_epoch_above_all_of_the_former_owner(store: Store) -> None:
    await put(store)
    await advance(store, 5, (40,))
    claimed = await store.claim_session("s1", "g2")
    record = replace(SESSION, epoch=EPOCHS_PER_OWNER, owner="g2", committed_len=1)
    assert claimed == LoggedSession(record=record, token_ids=(*PROMPT, 40))
    assert await store.session("s1") == claimed
    assert await advance(store, EPOCHS_PER_OWNER - 1, (40, 41)) is Written.TAKEN_OVER
    assert await advance(store, EPOCHS_PER_OWNER + 1, (40, 41), owner="g2") is Written.DONE


async def test_of_many_claims_at_once_each_gets_an_epoch_of_its_own(store: Store) -> None:
    await put(store)
    claims = await asyncio.gather(*(store.claim_session("s1", f"g{index}") for index in range(4)))
    epochs = sorted(claim.record.epoch for claim in claims if claim is not None)
    assert epochs == [EPOCHS_PER_OWNER * owner for owner in range(1, 5)]


async def test_a_session_that_nobody_knows_cannot_be_claimed_and_a_finished_one_can(store: Store) -> None:
    assert await store.claim_session("s1", "g2") is None
    await put(store, replace(SESSION, state=SessionState.LENGTH))
    claimed = await store.claim_session("s1", "g2")
    assert claimed is not None
    assert (claimed.record.epoch, claimed.record.owner) == (EPOCHS_PER_OWNER, "g2")


@pytest.mark.parametrize("first", ["g2", "g3"])
async def test_of_two_owners_of_one_range_of_epochs_the_one_that_the_store_knows_wins(store: Store, first: str) -> None:
    """A failover lost the claim of `g2`, and gave `g3` the same range: what each then has is written here."""
    second = {"g2": "g3", "g3": "g2"}[first]
    await put(store)
    known = replace(SESSION, epoch=EPOCHS_PER_OWNER, owner=first)
    assert await put(store, known) is Written.DONE
    for epoch in (EPOCHS_PER_OWNER, EPOCHS_PER_OWNER + 7):
        assert await put(store, replace(known, owner=second, epoch=epoch)) is Written.TAKEN_OVER
        assert await advance(store, epoch, (1,), owner=second) is Written.TAKEN_OVER
    assert await store.session("s1") == LoggedSession(record=known, token_ids=PROMPT)
    assert await advance(store, EPOCHS_PER_OWNER + 1, (1,), owner=first) is Written.DONE


async def test_an_owner_whose_claim_was_lost_is_the_owner_again_once_it_writes(store: Store) -> None:
    await put(store)
    assert await advance(store, EPOCHS_PER_OWNER, (40,), owner="g2") is Written.DONE
    logged = await store.session("s1")
    assert logged is not None
    assert (logged.record.epoch, logged.record.owner) == (EPOCHS_PER_OWNER, "g2")
    assert await advance(store, 5, (40, 41)) is Written.TAKEN_OVER


async def test_a_session_nobody_knows_cannot_be_advanced(store: Store) -> None:
    assert await advance(store, 5, (1,)) is Written.MISSING
    assert await store.session("s1") is None


async def test_an_old_session_is_forgotten(store: Store) -> None:
    await put(store, ttl_s=0.05)

    async def gone() -> bool:
        return await store.session("s1") is None

    await eventually(gone)
    assert await advance(store, 5, (1,)) is Written.MISSING


async def test_advancing_renews_the_time_to_live(store: Store) -> None:
    await put(store, ttl_s=2.0)
    await put(store, replace(SESSION, session_id="idle"), ttl_s=2.0)

    async def the_idle_one_is_gone() -> bool:
        assert await advance(store, 5, ()) is Written.DONE
        return await store.session("idle") is None

    await eventually(the_idle_one_is_gone)
    assert await store.session("s1") is not None


async def test_a_session_tells_how_long_ago_its_owner_wrote_it(store: Store) -> None:
    await put(store)
    await asyncio.sleep(0.1)
    logged = await store.session("s1")
    assert logged is not None
    assert logged.age_s > 0.09
    begun_s = time.monotonic()
    assert await advance(store, 5, (40,)) is Written.DONE
    logged = await store.session("s1")
    assert logged is not None
    assert 0.0 <= logged.age_s < time.monotonic() - begun_s + 0.01


async def test_of_many_owners_at_once_the_newest_wins(store: Store) -> None:
    await put(store)
    await asyncio.gather(*(advance(store, 5 + i % 7, (5 + i % 7,)) for i in range(49)))
    logged = await store.session("s1")
    assert logged is not None
    assert (logged.record.epoch, logged.token_ids) == (11, (*PROMPT, 11))


async def test_a_replica_marked_as_draining_is_seen_as_such_until_the_mark_or_the_replica_goes(store: Store) -> None:
    await store.announce(VERIFIER, ttl_s=60)
    await store.drain("v1")
    await store.announce(VERIFIER, ttl_s=60)
    assert await store.replicas() == [replace(VERIFIER, draining=True)]
    await store.drain("v1", draining=False)
    assert await store.replicas() == [VERIFIER]
    await store.drain("v1")
    await store.withdraw("v1")
    await store.announce(VERIFIER, ttl_s=60)
    assert await store.replicas() == [VERIFIER]


async def test_a_replica_sets_a_mark_anew_that_the_store_has_lost_but_none_that_was_taken_back(store: Store) -> None:
    assert not await store.announce(VERIFIER, ttl_s=60)
    await store.drain("v1")
    assert await store.announce(VERIFIER, ttl_s=60)
    await store.withdraw("v1")
    assert await store.announce(VERIFIER, ttl_s=60, marked=True)
    assert await store.replicas() == [replace(VERIFIER, draining=True)]
    await store.drain("v1", draining=False)
    assert not await store.announce(VERIFIER, ttl_s=60, marked=True)
    assert await store.replicas() == [VERIFIER]


async def test_ping_answers(store: Store) -> None:
    await store.ping()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://x", "must begin with redis://"),
        ("", "must begin with redis://"),
        ("redis//x", "must begin with redis://"),
        ("redis://host:99999/0", "Port out of range"),
        ("redis://host:x/0", "Port could not be cast to integer value"),
        ("redis://host?nonsense=1", "the option 'nonsense' is not one of client_name, db, "),
        ("redis://host?decode_responses=true", "the option 'decode_responses' is not one of "),
        ("redis://host?retry_on_error=a", "the option 'retry_on_error' is not one of "),
        (
            "redis://host?ssl_cert_reqs=none",
            "the option 'ssl_cert_reqs' is one of TLS, whose URLs begin with rediss://",
        ),
        ("redis://host?timeout=1", "the option 'timeout' is not one of "),
        ("rediss://host?ssl_cert_reqs=bad", "Invalid SSL Certificate Requirements Flag: bad"),
        ("rediss://host?ssl_ca_certs=/nope", "the option 'ssl_ca_certs' must name a file, got '/nope'"),
        ("redis://host?socket_timeout=x", "Invalid value for 'socket_timeout'"),
        ("redis://host?max_connections=-1", "max_connections"),
        ("redis://host?protocol=9", "protocol must be either 2 or 3"),
    ],
)
async def test_a_url_or_an_option_of_it_that_cannot_be_used_is_named(url: str, said: str) -> None:
    """An option that redis-py does not know used to end a service with a stack, when it dialled."""
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert str(caught.value).startswith(f"--redis-url {url.partition('?')[0]}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix"])
@pytest.mark.parametrize("option", sorted(URL_OPTIONS))
def test_every_option_fits_or_is_refused_in_words_of_ours(scheme: str, option: str) -> None:
    """One that exists and does not fit was answered by Python's `unexpected keyword argument`."""
    for value in ("1", "x", ""):
        said = ""
        try:
            open_store(f"{scheme}:///run/socket?{option}={value}")
        except ConfigError as error:
            said = str(error)
        assert "argument" not in said


async def test_without_a_store_a_replica_serves_unlisted_and_what_should_last_is_refused() -> None:
    async with open_store("memory://") as nowhere:
        assert not await nowhere.announce(VERIFIER, ttl_s=60, marked=True)
        assert await nowhere.replicas() == []
        assert await nowhere.claim_session("s1", "g1") is None
        for refused in (nowhere.drain("v1"), put(nowhere)):
            with pytest.raises(UnavailableError, match="memory:// keeps nothing"):
                await refused


async def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    store = open_store(f"redis://user:secret@{HOST}:1/0")
    with pytest.raises(UnavailableError, match=f"{HOST}:1") as caught:
        await store.ping()
    assert "secret" not in str(caught.value)
    with pytest.raises(UnavailableError):
        await store.replicas()
    await store.close()


async def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        store = RedisStore(f"redis://{HOST}:{silent.getsockname()[1]}/0", socket_timeout_s=0.05)
        with pytest.raises(UnavailableError, match="does not answer in time"):
            await store.ping()
        await store.close()


async def test_the_store_works_again_after_its_server_was_stopped_and_replaced(tmp_path: Path) -> None:
    with server_process(find_server(), tmp_path) as (port, process):
        store = RedisStore(f"redis://{HOST}:{port}/0", socket_timeout_s=0.2)
        await store.announce(VERIFIER, ttl_s=60)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(UnavailableError):
            await store.replicas()
        process.send_signal(signal.SIGCONT)
        assert await store.replicas() == [VERIFIER]
        process.kill()
        process.wait()
        with pytest.raises(UnavailableError):
            await store.replicas()
        with server_process(find_server(), tmp_path, port):
            await store.announce(VERIFIER, ttl_s=60)
            assert await store.replicas() == [VERIFIER]
        await store.close()


async def test_a_note_is_kept_for_its_time_and_a_new_one_replaces_none(store: Store) -> None:
    assert await store.note("a") is None
    assert await store.write_note("a", b"", ttl_s=60, new=True)
    assert await store.note("a") == b""
    assert not await store.write_note("a", b"other", ttl_s=60, new=True)
    assert await store.write_note("a", b"later", ttl_s=60)
    assert await store.note("a") == b"later"
    assert await store.write_note("a", b"short", ttl_s=0.05)

    async def gone() -> bool:
        return await store.note("a") is None

    await eventually(gone)
