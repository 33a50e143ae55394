"""The speculator for vLLM's V2 runner beside a scripted helper, and what the plug-in changes of vLLM: no vLLM here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.params import MAX_DRAFT_TOKENS
from paceline.vllm import Proposer, plugin
from paceline.vllm.plugin import register
from paceline.vllm.requests import HandedOut
from paceline.vllm.settings import V2_VARIABLE, most_guesses, speculation_of
from paceline.vllm.speculator import FILLER, Speculator
from tests.support.scripted_helper import VARIABLE
from tests.support.vllm_batch import sampling_params, vllm_config

PATIENCE_S = 60.0
# Of texts that grow by a token a step, until the helper process is there.
MAX_LEN, MOST = 60_000, 4
LACKED = ["speculative method 'custom_class'", "something else"]


class Runner:
    """What a speculator sees of vLLM's V2 runner: requests in slots, with their tokens on the device."""

    def __init__(self, config: Any) -> None:
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.full((4, MAX_LEN), 7, dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(4, dtype=torch.int32)),
            draft_tokens=torch.zeros((4, MOST), dtype=torch.int64),
            req_id_to_index=dict[str, int](),
            max_model_len=MAX_LEN,
        )
        self.speculator = Speculator(config, self.states)
        self.speculator.init_cudagraph_manager("none")
        self._reading: set[str] = set()

    def admit(self, name: str, slot: int, prompt: list[int], *, reads: bool = False, **sampling: Any) -> None:
        self.speculator.admit(name, sampling_params(**sampling))
        self.states.req_id_to_index[name] = slot
        self.states.all_token_ids.gpu[slot, : len(prompt)] = torch.tensor(prompt)
        self.states.total_len.gpu[slot] = len(prompt)
        if reads:
            self._reading.add(name)

    def last(self, name: str) -> int:
        slot = self.states.req_id_to_index[name]
        return int(self.states.all_token_ids.gpu[slot, self.states.total_len.gpu[slot] - 1])

    def step(self, *names: str, **settings: Any) -> torch.Tensor:
        """Each request commits the token after its last one; returns the guesses as the runner gets them."""
        slots = [self.states.req_id_to_index[name] for name in names]
        for name, slot in zip(names, slots, strict=True):
            if name not in self._reading:
                length = int(self.states.total_len.gpu[slot])
                self.states.all_token_ids.gpu[slot, length] = self.last(name) + 1
                self.states.total_len.gpu[slot] = length + 1
        batch = SimpleNamespace(
            num_reqs=len(names),
            req_ids=[*names],
            idx_mapping=torch.tensor(slots),
            num_draft_tokens_per_req=np.zeros(len(names), np.int32),
        )
        num_sampled = torch.tensor([0 if name in self._reading else 1 for name in names], dtype=torch.int32)
        found = self.speculator.propose(batch, None, {}, None, None, num_sampled, *[None] * 5, **settings)
        assert found.dtype == torch.int64
        assert found.shape == (len(names), MOST)
        return torch.as_tensor(found)

    def until_drafted(self, *names: str) -> torch.Tensor:
        end_s = time.monotonic() + PATIENCE_S
        while not any(self.speculator.handed_out[1]):
            self.step(*names)
            assert time.monotonic() < end_s
            time.sleep(0.002)
        return self.step(*names)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scripted_helpers: None) -> Any:
    del scripted_helpers
    monkeypatch.setenv(VARIABLE, "answers")
    return vllm_config(str(tmp_path), vocab_size=100_000, max_model_len=MAX_LEN)


@pytest.fixture
def runner(config: Any) -> Iterator[Runner]:
    made = Runner(config)
    yield made
    made.speculator.client.close()


def test_guesses_are_on_the_device_by_request_and_vllm_is_told_how_many_each_has(runner: Runner) -> None:
    runner.admit("a", 2, [10, 11, 12])
    runner.admit("b", 0, [500], reads=True)
    drafts = runner.until_drafted("b", "a")
    last = runner.last("a")
    assert drafts.tolist() == [[FILLER] * MOST, [last + 1, last + 2, last + 3, last + 4]]
    assert runner.speculator.handed_out == (["b", "a"], [[], [last + 1, last + 2, last + 3, last + 4]])


def test_a_request_that_is_off_gets_no_guess_beside_others(runner: Runner) -> None:
    runner.admit("a", 2, [10, 11, 12])
    runner.admit("off", 0, [500], extra_args={"speculation.enabled": False})
    runner.admit("biased", 1, [700], logit_bias={3: 1.0})
    drafts = runner.until_drafted("off", "biased", "a").tolist()
    assert drafts[:2] == [[FILLER] * MOST] * 2
    assert [len(chain) for chain in runner.speculator.handed_out[1]] == [0, 0, MOST]
    # Of a request that has ended nothing is kept.
    del runner.states.req_id_to_index["off"]
    runner.step("a")
    assert runner.speculator._sampling.keys() == {"a", "biased"}


def test_without_a_helper_nothing_is_kept_of_ended_requests(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.speculator.client, "guesses", lambda num_rows, _: [[]] * num_rows)
    for name in ("a", "b", "c"):
        runner.states.req_id_to_index.clear()
        runner.admit(name, 0, [10])
        runner.step(name)
    assert runner.speculator._sampling.keys() == {"c"}


def test_of_fewer_guesses_a_step_the_first_are_handed_out(runner: Runner) -> None:
    runner.admit("a", 1, [10])
    runner.until_drafted("a")
    last = runner.last("a") + 1
    assert runner.step("a", num_speculative_tokens=2).tolist() == [[last + 1, last + 2, FILLER, FILLER]]


def test_a_run_that_computes_nothing_is_told_to_nobody(runner: Runner) -> None:
    runner.admit("a", 1, [10])
    assert runner.step("a", dummy_run=True).tolist() == [[FILLER] * MOST]
    assert runner.speculator.handed_out == ((), ())


def test_what_v2_does_not_serve_with_the_tier_is_refused_by_name(config: Any) -> None:
    config.watermark_config = SimpleNamespace()
    with pytest.raises(ConfigError, match=f"{V2_VARIABLE}=1 .* a watermark_config is not supported"):
        Speculator(config, None)
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match=f"{V2_VARIABLE}=1 .* prefill context parallelism is not supported"):
        Speculator(config, None)


class TheirRunner:
    """vLLM's, of both kinds, as far as the plug-in changes it."""

    speculator: Any = None
    drafter: Any = None

    def take_draft_token_ids(self) -> str:
        return "theirs"

    def add_requests(self, scheduler_output: Any) -> None:
        self.added = scheduler_output

    def propose_draft_token_ids(self, scheduler_output: Any, sampled: Any) -> list[Any]:
        return [scheduler_output, sampled]


class TheirSampling(SimpleNamespace):
    """vLLM's sampling parameters, with the check that the plug-in changes."""

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        if speculative_config is not None and (self.min_p or self.logit_bias):
            raise ValueError("not yet supported with speculative decoding")


class TheirProcessor:
    """vLLM's, which checks requests."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


class TheirError(Exception):
    """vLLM's error of a request."""

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, config: Any) -> Any:
    """The names in vLLM that the plug-in replaces, and those it uses."""

    class VllmConfig(SimpleNamespace):
        def _get_v2_model_runner_unsupported_features(self) -> list[str]:
            return [*LACKED]

    spec_decode = ModuleType("spec_decode")
    spec_decode.init_speculator = lambda *_: "theirs"  # type: ignore[attr-defined]
    runner, runner_v1 = (type("GPUModelRunner", (TheirRunner,), {}) for _ in range(2))
    sampling, processor = type("SamplingParams", (TheirSampling,), {}), type("InputProcessor", (TheirProcessor,), {})
    logits = {"LogitsProcessors": list, "BUILTIN_LOGITS_PROCESSORS": [lambda *given: ("min_tokens", *given[1:])]}
    for name, contents in {
        "vllm.config": {"VllmConfig": VllmConfig},
        "vllm.v1.worker.gpu": {"spec_decode": spec_decode},
        "vllm.v1.outputs": {"DraftTokenIds": lambda *lists: lists},
        plugin.RUNNER_MODULE: {"GPUModelRunner": runner},
        plugin.V1_RUNNER_MODULE: {"GPUModelRunner": runner_v1, "build_logitsprocs": lambda *_: "theirs"},
        plugin.ARGUMENTS_MODULE: {},
        "vllm.v1.engine.input_processor": {"InputProcessor": processor},
        "vllm.v1.sample": {"logits_processor": SimpleNamespace(**logits)},
        "vllm.sampling_params": {"SamplingParams": sampling},
        "vllm.exceptions": {"VLLMValidationError": TheirError},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(
        config=VllmConfig(**vars(config)),
        spec_decode=spec_decode,
        runner=runner,
        runner_v1=runner_v1,
        sampling=sampling,
        processor=processor,
    )


def test_the_plug_in_puts_the_speculator_in_where_the_tier_is_asked_for(vllm: Any, config: Any) -> None:
    for _ in range(2):
        register()
    made = vllm.spec_decode.init_speculator(vllm.config, "cpu", SimpleNamespace(draft_tokens=None))
    assert isinstance(made, Speculator)
    runner = vllm.runner()
    runner.speculator = made
    made.handed_out = HandedOut(["a"], [[5]])
    # Once: a step without guesses must not get those of the one before.
    assert [runner.take_draft_token_ids() for _ in range(2)] == [(["a"], [[5]]), ((), ())]
    runner.add_requests(new := SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="a", sampling_params=7)]))
    assert (runner.added, made._sampling) == (new, {"a": 7})
    made.client.close()
    # Another method of speculation, or none of our settings: all is as it was.
    runner.speculator = object()
    assert runner.take_draft_token_ids() == "theirs"
    runner.add_requests(None)
    vllm.config.additional_config = {}
    assert vllm.spec_decode.init_speculator(vllm.config, "cpu", None) == "theirs"
    assert vllm.config._get_v2_model_runner_unsupported_features() == LACKED


def test_v2_takes_the_tier_and_lacks_what_it_lacks_without(vllm: Any) -> None:
    register()
    assert vllm.config._get_v2_model_runner_unsupported_features() == [LACKED[1]]


def test_a_vllm_without_these_names_is_left_alone(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    del vllm.spec_decode.init_speculator
    register()
    assert "no place in this vLLM" in caplog.text


def test_a_proposer_sees_the_requests_of_its_v1_runner(vllm: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    proposer = Proposer(config)
    runner, step = vllm.runner_v1(), SimpleNamespace(scheduled_spec_decode_tokens={"a": [1, 2]})
    runner.drafter, runner.input_batch, runner.requests = proposer, SimpleNamespace(req_ids=["a"]), {}
    assert runner.propose_draft_token_ids(step, [[4]]) == [step, [[4]]]
    assert proposer._names == ["a"]
    proposer.handed_out = HandedOut(["a"], [[5]])
    assert [runner.take_draft_token_ids() for _ in range(2)] == [(["a"], [[5]]), ((), ())]
    build = sys.modules[plugin.V1_RUNNER_MODULE].build_logitsprocs
    assert build(config, "cpu", False, False, ()) == [("min_tokens", "cpu", False)]
    # A drafter of vLLM's own, pooling models and processors of users: as without us.
    runner.drafter = object()
    assert runner.propose_draft_token_ids(step, [[4]]) == [step, [[4]]]
    assert runner.take_draft_token_ids() == "theirs"
    assert build(config, "cpu", False, True, ()) == build(config, "cpu", False, False, ("their.Processor",)) == "theirs"


def test_with_the_tier_requests_are_checked_for_what_they_say_of_speculation(vllm: Any) -> None:
    register()
    # A vLLM without the tier still refuses what its own drafts cannot serve.
    own = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle"), additional_config={})
    vllm.processor(own)
    with pytest.raises(ValueError, match="not yet supported"):
        vllm.sampling(min_p=0.1, logit_bias=None)._validate_spec_decode(own.speculative_config)
    for _ in range(2):
        vllm.processor(vllm.config)
    with pytest.raises(ValueError, match="not yet supported"):
        vllm.sampling(min_p=0.1, logit_bias=None)._validate_spec_decode(own.speculative_config)
    tier = vllm.config.speculative_config
    for more in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}, {"extra_args": {"speculation.enabled": 0, "other": "x"}}):
        vllm.sampling(**vars(sampling_params(**more)))._validate_spec_decode(tier)
    for name, wrong in (
        ("speculation.enabled", {"extra_args": {"speculation.enabled": "no"}}),
        ("logprob_token_ids", {"logprob_token_ids": [5, 6]}),
    ):
        with pytest.raises(TheirError, match=name) as refused:
            vllm.sampling(**vars(sampling_params(**wrong)))._validate_spec_decode(tier)
        assert refused.value.parameter == name


@pytest.mark.parametrize(
    ("extra_args", "most"),
    [
        (None, MAX_DRAFT_TOKENS),
        ({"kv_transfer_params": {}, "speculative": 1}, MAX_DRAFT_TOKENS),
        ({"speculation.enabled": 1, "speculation.method": "draft_model"}, MAX_DRAFT_TOKENS),
        ({"speculation.enabled": False, "speculation.max_draft_tokens": 3}, 0),
        ({"speculation.max_draft_tokens": 3}, 3),
    ],
)
def test_a_request_says_how_many_guesses_it_takes(extra_args: dict[str, Any] | None, most: int) -> None:
    assert most_guesses(sampling_params(extra_args=extra_args)) == most


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("speculation", "off", "is not known under vLLM; known: speculation.enabled, speculation.max_draft_tokens, "),
        ("speculation.gamma", 3, "is not known under vLLM"),
        ("speculation.enabled", 2, "must be true or false, got 2"),
        ("speculation.max_draft_tokens", 1.5, "must be a whole number, got 1.5"),
        ("speculation.max_draft_tokens", True, "must be a whole number, got True"),
        ("speculation.max_draft_tokens", "9" * 1000, f"must be a whole number, got '{'9' * 63}"),
        ("speculation.max_draft_tokens", 65, "must be a number from 0 to 64, got 65"),
        ("speculation.method", "eagle3", "under vLLM must be draft_model, got 'eagle3'"),
    ],
)
def test_what_a_request_says_wrongly_is_named_and_gives_it_no_guess(name: str, value: object, said: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        speculation_of({name: value})
    assert refused.value.field == name
    assert refused.value.problem.startswith(said)
    assert most_guesses(sampling_params(extra_args={name: value})) == 0


def test_the_plug_in_brings_nothing_along_that_vllms_workers_fail_at() -> None:
    code = "import sys, paceline.vllm.plugin; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
