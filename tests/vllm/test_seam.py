"""What the installed vLLM says to a proposer is what ours takes: the seam is marked experimental, and may change."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core.errors import ConfigError
from paceline.vllm import Proposer
from paceline.vllm.settings import READ, TESTED, check_version, installed_version

pytestmark = pytest.mark.vllm

RUNNER, CPU_RUNNER = "v1/worker/gpu_model_runner.py", "v1/worker/cpu_model_runner.py"
PROPOSERS = "v1/spec_decode/custom_class_proposer.py"
CHANGED = "vLLM has changed what it says to a proposer: adapt paceline.vllm.Proposer, then this"


def tree_of(path: str) -> ast.Module:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))


def calls(tree: ast.AST, ending: str) -> list[ast.Call]:
    """All calls in a tree of what ends so."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in found if ast.unparse(call.func).endswith(ending)]


def branch_of(tree: ast.AST, condition: str) -> ast.Module:
    """What is done on a condition."""
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == condition]
    assert len(branches) == 1, f"{condition} stands in {RUNNER} {len(branches)} times. {CHANGED}"
    return ast.Module(body=branches[0].body, type_ignores=[])


def said(call: ast.Call) -> tuple[list[str], dict[str, str]]:
    return [ast.unparse(each) for each in call.args], {str(each.arg): ast.unparse(each.value) for each in call.keywords}


def test_a_proposer_is_called_with_the_arguments_that_ours_takes() -> None:
    (call,) = calls(branch_of(tree_of(RUNNER), "spec_config.method == 'custom_class'"), ".propose")
    args, keywords = said(call)
    expected = ["sampled_token_ids", "self.input_batch.num_tokens_no_spec", "self.input_batch.token_ids_cpu"]
    assert args == expected, CHANGED
    assert keywords == {"slot_mappings": "slot_mappings"}, CHANGED
    bound = inspect.signature(Proposer.propose).bind(None, *args, **keywords)
    names = list(bound.arguments)[1:]
    assert names == ["sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu", "slot_mappings"]


def test_a_proposer_is_made_with_vllms_configuration_and_then_told_to_load() -> None:
    (made,) = calls(branch_of(tree_of(RUNNER), "self.speculative_config.method == 'custom_class'"), "_proposer")
    assert said(made) == (["self.vllm_config"], {}), CHANGED
    (built,) = calls(tree_of(PROPOSERS), "user_class")
    assert said(built) == (["vllm_config"], {}), CHANGED
    inspect.signature(Proposer).bind(SimpleNamespace())
    (loads,) = calls(tree_of(CPU_RUNNER), "self.drafter.load_model")
    inspect.signature(Proposer.load_model).bind(None, *loads.args)


def test_vllm_finds_the_class_by_its_path() -> None:
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(model="paceline.vllm.Proposer", num_speculative_tokens=7),
        additional_config={},
    )
    # Found and called: what it says is ours.
    with pytest.raises(RuntimeError, match="--additional-config must hold a section paceline"):
        create_custom_proposer(config)


def test_the_installed_version_is_the_one_that_users_are_let_go_on_with() -> None:
    assert installed_version() in TESTED
    check_version(installed_version(), untested=False)
    for version in READ:
        check_version(version, untested=False)
    with pytest.raises(ConfigError, match="was not tested"):
        check_version("0.99.0", untested=False)
