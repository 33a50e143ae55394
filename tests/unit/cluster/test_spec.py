"""From settings to the commands of a fleet's processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.docs.blocks import commands
from tests.support.commands import asked

import paceline
from paceline.checkpoints.cached import SMOLLM2
from paceline.checkpoints.safetensor_files import num_parameters
from paceline.cluster.checkpoints import (
    DEMO_DRAFTER,
    HEADS,
    Checkpoints,
    check_checkpoint,
    fetch_models,
    resolve_checkpoints,
    with_heads,
)
from paceline.cluster.spec import (
    UNCLAIMED,
    CpuShare,
    FleetSpec,
    Launch,
    Ports,
    ServicePort,
    plan_endpoints,
    share_cpus,
    share_memory,
)
from paceline.cluster.supervisor import ChildSpec, child_environment
from paceline.cluster.up import describe
from paceline.cluster.valkey import find_server
from paceline.core.errors import ConfigError
from paceline.gateway.doors import listening_socket
from paceline.service.config import load

HOST = "127.0.0.1"
VERIFIER = ServicePort(name="verifier-0", role="verifier", host="127.0.0.1", port=1, second_port=2)
DRAFTER = ServicePort(name="drafter-0", role="drafter", host="127.0.0.1", port=3, second_port=4)
GATEWAY = ServicePort(name="gateway-0", role="gateway", host="127.0.0.1", port=5, second_port=6)


def fleet(*argv: str) -> FleetSpec:
    return load(FleetSpec, argv, {}, "paceline up", "")


def load_free(*argv: str) -> FleetSpec:
    ports = ("gateway", "gateway-grpc", "verifier", "verifier-metrics", "drafter", "drafter-metrics", "redis")
    zeros = [word for port in ports for word in (f"--{port}-port", "0")]
    return fleet(*zeros, *argv)


ALONE = CpuShare(num_threads=1, cpus=())


def launch(spec: FleetSpec) -> Launch:
    return Launch(spec=spec, redis_url="redis://:secret@r", log_dir=Path("/l"), environ={})


def model(spec: FleetSpec, endpoint: ServicePort = VERIFIER, share: CpuShare = ALONE, **more: float) -> ChildSpec:
    return launch(spec).model(endpoint, Path("/m"), share, **more)


def gateway(spec: FleetSpec) -> ChildSpec:
    return launch(spec).gateway(GATEWAY, Path("/m"))


def flags(child: ChildSpec) -> dict[str, str]:
    assert child.argv[1] == "-m"
    rest = child.argv[3:]
    return dict(zip(rest[::2], rest[1::2], strict=True))


@contextmanager
def port_in_use() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def planned(spec: FleetSpec) -> list[ServicePort]:
    with ExitStack() as held:
        return plan_endpoints(spec, Ports(HOST, held))


def all_ports(endpoints: Iterable[ServicePort]) -> list[int]:
    return [port for endpoint in endpoints for port in (endpoint.port, endpoint.second_port)]


def test_free_ports_are_all_different() -> None:
    spec = load_free("--num-verifiers", "3", "--num-drafters", "2", "--num-gateways", "2")
    endpoints = planned(spec)
    assert [endpoint.name for endpoint in endpoints] == [
        *("verifier-0", "verifier-1", "verifier-2", "drafter-0", "drafter-1", "gateway-0", "gateway-1", "valkey")
    ]
    ports = all_ports(endpoints)[:-1]
    assert len(set(ports)) == len(ports) == 15
    # Outgoing connections are given others, and take none of them before its service listens.
    assert set(ports) <= set(UNCLAIMED)


def test_a_host_that_is_not_ours_is_named_for_free_ports_too() -> None:
    with ExitStack() as held, pytest.raises(ConfigError, match=r"--verifier-port 0: cannot listen on 192\.0\.2\.1"):
        Ports("192.0.2.1", held).take(0, "--verifier-port")


def test_where_traces_go_reaches_all_services_and_the_ratio_those_that_begin_them() -> None:
    spec = fleet("--otlp-traces-endpoint", "http://c:4317", "--trace-sample-ratio", "0.25")
    given = [flags(each) for each in (model(spec), model(spec, DRAFTER), gateway(spec))]
    assert [each["--otlp-traces-endpoint"] for each in given] == ["http://c:4317"] * 3
    assert [each.get("--trace-sample-ratio") for each in given] == ["0.25", None, "0.25"]
    assert "--otlp-traces-endpoint" not in flags(model(fleet()))


def test_without_drafter_none_is_planned() -> None:
    roles = {endpoint.role for endpoint in planned(load_free("--no-drafter"))}
    assert roles == {"verifier", "gateway", "valkey"}
    assert "valkey" not in {each.role for each in planned(load_free("--redis-url", "redis://127.0.0.1:1"))}


def test_a_port_in_use_is_named_by_its_flag() -> None:
    with port_in_use() as port:
        for flag in ("--verifier-port", "--drafter-metrics-port", "--gateway-grpc-port"):
            with pytest.raises(ConfigError, match=rf"{flag} \d+: cannot listen"):
                planned(load_free(flag, port))
        with pytest.raises(ConfigError, match=r"--redis-port .*--redis-url"):
            planned(load_free("--redis-port", port))


def test_all_ports_in_use_are_named_at_once_and_an_offset_moves_all() -> None:
    with port_in_use() as one, port_in_use() as other:
        flags = ("--verifier-port", one, "--gateway-port", other, "--redis-port", one)
        named = f"--verifier-port {one}, --gateway-port {other}, --redis-port {one}: cannot listen"
        with pytest.raises(ConfigError, match=named):
            planned(load_free(*flags))
    moved = load_free("--gateway-port", "8000", "--redis-port", "6379", "--port-offset", "1000")
    assert (moved.moved(moved.gateway_port, 2), moved.moved(moved.redis_port)) == (9020, 7379)
    assert moved.moved(moved.verifier_port, 2) == 0


def test_two_processes_get_no_port_both() -> None:
    with ExitStack() as held:
        ports = Ports(HOST, held)
        port = str(plan_endpoints(load_free(), ports)[0].port)
        with pytest.raises(ConfigError, match=rf"--redis-port {port}: cannot listen"):
            plan_endpoints(load_free("--redis-port", port), ports)
    with pytest.raises(ConfigError, match=rf"--drafter-port {port}: cannot listen"):
        planned(load_free("--verifier-port", port, "--drafter-port", port))


def test_a_port_is_its_services_alone_from_the_moment_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held:
        port = Ports(HOST, held).take(0, "--gateway-port")
        # Another fleet looks there.
        monkeypatch.setattr("secrets.SystemRandom.sample", lambda *_: [port, port - 1, port + 1])
        assert Ports(HOST, held).take(0, "--drafter-metrics-port") != port
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect((HOST, port))
        with listening_socket(HOST, port), socket.socket() as client:
            client.connect((HOST, port))
            with pytest.raises(ConfigError, match="cannot listen"):
                Ports(HOST, held).take(port, "--gateway-port")


def test_drafters_get_one_cpu_each_and_verifiers_the_rest() -> None:
    verifier, drafter = CpuShare(num_threads=1, cpus=(0,)), CpuShare(num_threads=1, cpus=(1,))
    assert share_cpus(fleet("--no-lend"), [0, 1]) == ([verifier], [drafter])
    assert share_cpus(fleet(), [0, 1]) == ([replace(verifier, spare_cpus=(1,))], [replace(drafter, lends=True)])
    assert share_cpus(fleet("--no-drafter"), [0, 1]) == ([CpuShare(num_threads=2, cpus=())], [])
    verifiers, drafters = share_cpus(fleet("--num-verifiers", "2", "--num-drafters", "2"), list(range(9)))
    assert [share.cpus for share in verifiers] == [(0, 1, 2), (3, 4, 5)]
    assert [share.cpus for share in drafters] == [(6,), (7,)]
    assert [share.spare_cpus for share in verifiers] == [(6,), (7,)]


def test_too_few_cpus_pin_nothing() -> None:
    verifiers, drafters = share_cpus(FleetSpec(), [0])
    assert [*verifiers, *drafters] == [ALONE] * 2
    verifiers, drafters = share_cpus(fleet("--verifier-threads", "2"), [0, 1])
    assert [share.num_threads for share in verifiers] == [2]
    assert {share.cpus for share in [*verifiers, *drafters]} == {()}


def test_lent_cpus_reach_the_services() -> None:
    child = model(FleetSpec(), share=CpuShare(num_threads=1, cpus=(0,), spare_cpus=(1, 2)))
    assert flags(child)["--spare-cpus"] == "1,2"
    assert child.env["OMP_NUM_THREADS"] == "3"
    assert model(FleetSpec(), DRAFTER, CpuShare(num_threads=1, cpus=(1,), lends=True)).argv[-1] == "--idle-priority"


def test_memory_is_shared_out_in_proportion_to_the_models_and_vllm_has_its_own_share() -> None:
    spec = fleet("--memory-utilization", "0.6")
    shares = share_memory(spec, [8_000_000_000, 500_000_000, 500_000_000])
    assert sum(shares) == pytest.approx(0.6)
    assert shares == pytest.approx([0.6 * 17 / 21, 0.6 * 2 / 21, 0.6 * 2 / 21])
    assert share_memory(spec, [10**12, 0])[1] == 0.01
    assert flags(model(spec, memory_utilization=0.25))["--memory-utilization"] == "0.25"
    under_vllm = fleet("--verifier-engine", "vllm")
    assert "--memory-utilization" not in flags(model(under_vllm, memory_utilization=0.25))


def test_vllm_is_started_with_its_own_python_and_borrows_no_cpus() -> None:
    spec = fleet(
        "--verifier-engine", "vllm", "--verifier-python", "/v/bin/python", "--verifier-arg=--vllm-arg=--swap=1"
    )
    (share,), _ = share_cpus(spec, [0, 1])
    verifier, drafter = model(spec, share=share), model(spec, DRAFTER)
    assert verifier.argv[:3] == ("/v/bin/python", "-m", "paceline.verifier")
    assert verifier.argv[-3:] == ("--engine", "vllm", "--vllm-arg=--swap=1")
    assert "--spare-cpus" not in verifier.argv
    assert drafter.argv[0] == sys.executable
    assert "--engine" not in drafter.argv


def test_a_verifier_gets_its_flags() -> None:
    config = '{"method": "draft_model", "num_speculative_tokens": 4}'
    spec = fleet("--speculative-config", config, "--dtype", "float32")
    given = flags(model(spec, share=CpuShare(num_threads=2, cpus=(0, 3))))
    assert given == {
        "--host": "127.0.0.1",
        "--port": "1",
        "--replica-id": "verifier-0",
        "--grace-s": "15",
        "--metrics-port": "2",
        "--model": "/m",
        "--dtype": "float32",
        "--threads": "2",
        "--cpus": "0,3",
        "--speculative-config": config,
    }


def test_more_arguments_reach_the_service_named() -> None:
    spec = fleet("--verifier-arg=--max-num-seqs", "--verifier-arg=8", "--drafter-arg=--draft-width=1")
    assert flags(model(spec))["--max-num-seqs"] == "8"
    child = model(spec, DRAFTER)
    assert child.argv[-1] == "--draft-width=1"
    assert "--speculative-config" not in child.argv
    given = flags(gateway(spec))
    assert (given["--port"], given["--grpc-port"], given["--model"]) == ("5", "6", "/m")


def test_the_stores_password_stands_in_no_command_line() -> None:
    for child in (model(FleetSpec(), DRAFTER), gateway(FleetSpec())):
        assert not any("secret" in argument for argument in child.argv)
        assert child.env["PACELINE_REDIS_URL"] == "redis://:secret@r"


def test_children_inherit_the_environment_but_of_our_settings_only_those_of_the_host() -> None:
    environ = {"HOME": "/h", "PACELINE_PORT": "1", "PACELINE_LEARNED_DIR": "none", "PYTHONPATH": "/x"}
    environ["PACELINE_REHEARSE"] = "off"
    env = child_environment(environ, num_threads=3)
    root = str(Path(paceline.__file__).parents[1])
    assert env["HOME"] == "/h"
    assert "PACELINE_PORT" not in env
    assert (env["PACELINE_LEARNED_DIR"], env["PACELINE_REHEARSE"]) == ("none", "off")
    assert env["PYTHONPATH"].split(":") == [root, "/x"]
    assert (env["OMP_WAIT_POLICY"], env["OMP_NUM_THREADS"]) == ("PASSIVE", "3")
    assert 0 < int(env["GOMP_SPINCOUNT"]) < 100_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_target_of_ones_own_needs_a_draft_model_or_none_at_all(checkpoint: Path) -> None:
    alone = fleet("--model", str(checkpoint))
    with pytest.raises(ConfigError, match=r"--draft-model PATH beside it, or --no-drafter"):
        resolve_checkpoints(alone, {}, print)
    plain = fleet("--model", str(checkpoint), "--no-drafter")
    assert resolve_checkpoints(plain, {}, print).drafts == ()


def test_the_draft_model_may_stand_in_vllms_json(checkpoint: Path) -> None:
    config = json.dumps({"method": "draft_model", "model": str(DEMO_DRAFTER)})
    shutil.copy(DEMO_DRAFTER / "tokenizer.json", checkpoint)
    spec = fleet("--model", str(checkpoint), "--speculative-config", config)
    assert resolve_checkpoints(spec, {}, print).drafts == (DEMO_DRAFTER,)
    for broken in ("{", "[]", "8"):
        with pytest.raises(ConfigError, match="--speculative-config must be a JSON object"):
            resolve_checkpoints(fleet("--model", str(checkpoint), "--speculative-config", broken), {}, print)


def test_folders_of_heads_go_to_the_verifiers_as_absolute_paths(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    asked = {"method": "ngram+medusa", "medusa_model": checkpoint.name}
    spec = with_heads(fleet("--model", str(checkpoint), "--speculative-config", json.dumps(asked)))
    assert json.loads(flags(model(spec))["--speculative-config"]) == {**asked, "medusa_model": str(checkpoint)}


def test_the_demo_target_drafts_with_the_bundled_heads(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setitem(HEADS, "medusa", ("medusa_model", checkpoint))
    demo = with_heads(fleet("--speculative-config", '{"method": "medusa"}'))
    assert json.loads(demo.speculative_config)["medusa_model"] == str(checkpoint)
    other = with_heads(fleet("--model", str(checkpoint), "--speculative-config", '{"method": "medusa"}'))
    assert "medusa_model" not in json.loads(other.speculative_config)


def test_a_folder_of_heads_that_is_none_is_refused(checkpoint: Path) -> None:
    asked = json.dumps({"method": "medusa", "medusa_model": "/nowhere"})
    with pytest.raises(ConfigError, match="--speculative-config medusa_model /nowhere: no such folder"):
        with_heads(fleet("--speculative-config", asked))


def test_a_folder_that_is_no_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draft-model .*no such folder"):
        check_checkpoint(tmp_path / "x", "--draft-model")
    (checkpoint / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        num_parameters(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--model .*has no \*\.safetensors"):
        check_checkpoint(checkpoint, "--model")
    (checkpoint / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"--model .*holds no config\.json"):
        check_checkpoint(checkpoint, "--model")


def test_parameters_are_counted_without_loading_them(checkpoint: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
        }
    ).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(34)
    (checkpoint / "model.safetensors").write_bytes(whole)
    assert num_parameters(checkpoint) == 17
    (checkpoint / "model.safetensors").write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match=r"model\.safetensors .* not fully covered; fetch or copy it again"):
        num_parameters(checkpoint)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--speculative-config", '{"method": "ngarm"}'], "verifier-0 .* method must be one of .*ngarm"),
        (["--speculative-config", '{"num_speculative_token": 4}'], "verifier-0 .*num_speculative_token is no setting"),
        (["--verifier-arg=--max-num-seqs=0"], "verifier-0 cannot start: --max-num-seqs"),
        (
            ["--gateway-arg=--chat-template=/nowhere.jinja"],
            "gateway-0 cannot start: --chat-template /nowhere.jinja: No",
        ),
        (["--gateway-arg=--api-keys-file=/nowhere.txt"], "gateway-0 cannot start: --api-keys-file /nowhere.txt: No"),
    ],
)
def test_settings_and_files_of_a_service_are_checked_before_a_process_is_started(argv: list[str], problem: str) -> None:
    spec = fleet(*argv)
    with pytest.raises(ConfigError, match=problem):
        model(spec)
        gateway(spec)


@contextmanager
def without_root() -> Iterator[None]:
    """Root may read what nobody may."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("closed", ["", "config.json", "model.safetensors"])
def test_a_checkpoint_that_may_not_be_read_is_named_with_its_flag(checkpoint: Path, closed: str) -> None:
    # Nobody else may look into pytest's folders.
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = Path(shutil.copytree(checkpoint, Path(parent) / "model"))
        (folder / closed).chmod(0)
        with without_root(), pytest.raises(ConfigError, match=f"--model .*{closed}: Permission denied"):
            fetch_models(fleet("--model", str(folder)), lambda _: None)


def test_a_named_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--redis-server /nope"):
        find_server(Path("/nope"))
    assert find_server().name.endswith("-server")


def test_a_packaged_model_without_a_drafter_of_its_own_drafts_by_look_up(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.cluster.checkpoints.folder_of", lambda given, *_, **__: Path(given))
    monkeypatch.setattr("paceline.cluster.checkpoints.MODELS_FOLDER", checkpoint)
    spec = fetch_models(fleet("--model", "smollm2"), print)
    assert (spec.drafter, spec.speculative_config) == (False, "")
    own = fetch_models(fleet("--model", "smollm2", "--draft-model", str(DEMO_DRAFTER)), print)
    assert (own.drafter, own.draft_model) == (True, DEMO_DRAFTER)


def test_a_packaged_model_brings_its_drafter(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.cluster.checkpoints.folder_of", lambda given, *_, **__: Path(given))
    monkeypatch.setattr("paceline.cluster.checkpoints.MODELS_FOLDER", checkpoint.parent)
    folder = checkpoint.rename(checkpoint.with_name(SMOLLM2.drafter))
    assert fetch_models(fleet("--model", "smollm2"), print).draft_model == folder
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    head = json.loads(fetch_models(fleet("--model", "smollm2"), print).speculative_config)
    assert head == {"method": "eagle3+ngram+grammar", "eagle3_model": str(folder)}


def test_the_requests_that_up_prints_are_chats_where_the_model_has_a_template(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    checkpoints = Checkpoints(target=checkpoint, drafts=())
    for template, path in (("", "/v1/completions"), ("{{ messages }}", "/v1/chat/completions")):
        (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        lines = describe(fleet("--model", str(checkpoint)), checkpoints, [GATEWAY], []).split("Try it:\n")[1]
        curl, generate = commands(lines.partition("\n\n")[0], tmp_path, {})
        assert curl.words[2].endswith(path)
        assert json.loads(curl.words[-1])["model"] == checkpoint.name
        assert asked(list(generate.words[1:])).values.chat is bool(template)
