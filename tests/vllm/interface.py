"""All that our code takes of vLLM's, and whether the sources of a release have it: they are read, and none runs.

So a release without a build for CPUs is checked, too: by the sources in its wheel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable

# By file: functions and methods, and the parameters that we pass, take or replace, in this order among theirs.
FUNCTIONS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "config/vllm.py": {"VllmConfig._get_v2_model_runner_unsupported_features": ("self",)},
    "distributed/parallel_state.py": {"get_tp_group": ()},
    "exceptions.py": {"VLLMValidationError.__init__": ("self", "message", "parameter")},
    "sampling_params.py": {"SamplingParams._validate_spec_decode": ("self", "speculative_config")},
    "engine/arg_utils.py": {
        "EngineArgs.add_cli_args": ("parser",),
        "EngineArgs.from_cli_args": ("cls", "args"),
        "EngineArgs.create_engine_config": ("self",),
    },
    "v1/engine/input_processor.py": {"InputProcessor.__init__": ("self", "vllm_config")},
    "v1/engine/llm_engine.py": {"LLMEngine.from_vllm_config": ("cls", "vllm_config", "stat_loggers")},
    "v1/metrics/loggers.py": {
        "StatLoggerBase.__init__": ("self", "vllm_config", "engine_index"),
        "StatLoggerBase.record": ("self", "scheduler_stats", "iteration_stats"),
        "StatLoggerBase.log_engine_initialized": ("self",),
    },
    "v1/sample/logits_processor/__init__.py": {
        "build_logitsprocs": ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
    },
    "v1/sample/logits_processor/interface.py": {
        "LogitsProcessor.__init__": ("self", "vllm_config", "device", "is_pin_memory"),
    },
    "v1/sample/logits_processor/state.py": {"LogitsProcessors.__init__": ("self", "logitsprocs")},
    "v1/sample/rejection_sampler.py": {
        "expand_batch_to_tokens": ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
    },
    "v1/spec_decode/custom_class_proposer.py": {"create_custom_proposer": ("vllm_config",)},
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner.add_requests": ("self", "scheduler_output"),
        "GPUModelRunner.take_draft_token_ids": ("self",),
    },
    "v1/worker/gpu/spec_decode/__init__.py": {"init_speculator": ("vllm_config", "device", "req_states")},
    "v1/worker/gpu/spec_decode/speculator.py": {
        "BaseSpeculator.init_cudagraph_manager": ("self", "cudagraph_mode"),
        "BaseSpeculator.capture": ("self",),
        "BaseSpeculator.propose": (
            *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
            *("num_sampled", "dummy_run", "num_speculative_tokens"),
        ),
    },
    "v1/worker/gpu_input_batch.py": {"InputBatch.req_ids": ("self",)},
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner.propose_draft_token_ids": ("self", "scheduler_output", "sampled_token_ids"),
        "GPUModelRunner.take_draft_token_ids": ("self",),
    },
}
# By file and class: attributes that we read, or that are to be there.
ATTRIBUTES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "exceptions.py": {"VLLMClientError": ()},
    "sampling_params.py": {
        "RequestOutputKind": ("DELTA",),
        "SamplingParams": ("min_p", "logit_bias", "extra_args", "logprob_token_ids"),
    },
    "v1/core/sched/output.py": {
        "NewRequestData": ("req_id", "sampling_params"),
        "SchedulerOutput": ("scheduled_new_reqs", "scheduled_spec_decode_tokens"),
    },
    "v1/outputs.py": {"DraftTokenIds": ("req_ids", "draft_token_ids")},
    "v1/worker/gpu/input_batch.py": {
        "InputBatch": ("num_reqs", "req_ids", "idx_mapping", "num_draft_tokens_per_req"),
    },
    "v1/worker/gpu/states.py": {
        "RequestState": ("total_len", "all_token_ids", "req_id_to_index", "draft_tokens", "max_model_len"),
    },
    "v1/worker/gpu_input_batch.py": {"CachedRequestState": ("sampling_params",)},
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": ("requests", "input_batch", "drafter")},
}
# By file: names that the module itself assigns or imports.
NAMES: Mapping[str, Sequence[str]] = {
    "v1/sample/logits_processor/__init__.py": ("BUILTIN_LOGITS_PROCESSORS",),
    "v1/worker/gpu_model_runner.py": ("build_logitsprocs",),
}
# The abstract methods of the class whose place our speculator takes: more, and it lacks some.
SPECULATOR = "v1/worker/gpu/spec_decode/speculator.py", "BaseSpeculator"
ABSTRACT = {"init_cudagraph_manager", "capture", "propose"}


def missing(sources: Traversable) -> Iterator[str]:
    """Yields what the sources of vLLM lack of all this, each with its file.

    Args:
        sources: The folder of the package `vllm`.
    """
    for path, functions in FUNCTIONS.items():
        tree = _read(sources, path)
        for name, wanted in functions.items():
            found = _find(tree, name)
            if not isinstance(found, ast.FunctionDef):
                yield f"{path}: no function {name}"
            elif not _in_order(wanted, given := _parameters(found)):
                yield f"{path}: {name} needs parameters {', '.join(wanted)}, has {', '.join(given)}"
    for path, classes in ATTRIBUTES.items():
        tree = _read(sources, path)
        for name, attributes in classes.items():
            found = _find(tree, name)
            has = _attributes(found) if isinstance(found, ast.ClassDef) else None
            if has is None:
                yield f"{path}: no class {name}"
            else:
                yield from (f"{path}: {name} has no {each}" for each in attributes if each not in has)
    for path, names in NAMES.items():
        bound = _bound(_read(sources, path))
        yield from (f"{path}: the module has no {each}" for each in names if each not in bound)
    path, name = SPECULATOR
    if found := _find(_read(sources, path), name):
        yield from (f"{path}: {name}.{each} is abstract, too" for each in sorted(_abstract(found) - ABSTRACT))


def _read(sources: Traversable, path: str) -> ast.Module:
    try:
        return ast.parse(sources.joinpath(*path.split("/")).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ast.Module(body=[], type_ignores=[])


def _find(tree: ast.AST, name: str) -> ast.AST | None:
    """The function or class of a dotted name."""
    for part in name.split("."):
        here = [each for each in ast.iter_child_nodes(tree) if getattr(each, "name", None) == part]
        if not here:
            return None
        tree = here[-1]
    return tree


def _parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _in_order(wanted: Sequence[str], given: Sequence[str]) -> bool:
    left = iter(given)
    return all(each in left for each in wanted)


def _attributes(found: ast.ClassDef) -> set[str]:
    """Names that the class or its methods assign."""
    named = {each.id for each in ast.walk(found) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    own = {each.attr for each in ast.walk(found) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
    return named | own


def _bound(module: ast.Module) -> set[str]:
    """Names that a module assigns or imports outside functions and classes."""
    imported = {
        each.asname or each.name for node in module.body if isinstance(node, ast.ImportFrom) for each in node.names
    }
    assigned = (node for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign))
    return imported | {each.id for node in assigned for each in ast.walk(node) if isinstance(each, ast.Name)}


def _abstract(found: ast.AST) -> set[str]:
    return {
        each.name
        for each in ast.iter_child_nodes(found)
        if isinstance(each, ast.FunctionDef)
        and any(isinstance(by, ast.Name) and by.id == "abstractmethod" for by in each.decorator_list)
    }
