"""All layers of a step as one compiled call.

A layer is ten calls of some ten microseconds. Made one by one from Python, each lets go of the interpreter and has to
win it back from the event loop, which is busy with the last step's tokens: a small model's step took twice as long
beside a gateway as alone. Here the interpreter is let go once.

Layers are told to compiled code by the addresses of their arrays: as arguments their number would be part of its type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from paceline.engine.backends.cpu.attention import attend_rows
from paceline.engine.backends.cpu.kv import CpuKVCache, as_array
from paceline.engine.backends.cpu.layer_kernels import add_rms_norm_rows, project_rows, rms_norm_rows, silu_mul_rows
from paceline.engine.backends.cpu.linear import PackedLinear
from paceline.engine.backends.cpu.product import OUTPUTS, multiply
from paceline.engine.backends.cpu.simd import LANES
from paceline.engine.batch import Batch
from paceline.engine.layers import LlamaLayer
from paceline.kernel_cache import kernel

# Columns of a layer's addresses: four norms, then weight and bias of four products.
_INPUT_NORM, _QUERY_NORM, _KEY_NORM, _POST_NORM, _QKV, _OUT, _GATE_UP, _DOWN = 0, 1, 2, 3, 4, 6, 8, 10


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any) -> Any:
    signature = types.voidptr(types.int64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return signature, codegen


def _weights_at(address: Any, groups: Any, inputs: Any) -> Any:
    """The weights of a `Product` of rows `inputs`, whose kind they have; compiled code only."""
    raise NotImplementedError


@overload(_weights_at)  # type: ignore[untyped-decorator]
def _weights_of(address: Any, groups: Any, inputs: Any) -> Any:
    def single(address: Any, groups: Any, inputs: Any) -> Any:
        return carray(_pointer(address), (groups, inputs.shape[1], 2, LANES), np.float32)

    def pairs(address: Any, groups: Any, inputs: Any) -> Any:
        return carray(_pointer(address), (groups, (inputs.shape[1] + 1) // 2, 2, LANES), np.uint32)

    return single if inputs.dtype == types.float32 else pairs


@kernel
def _copy(source: Any, target: Any) -> None:
    for index in range(len(source)):
        target[index] = source[index]


@kernel
def _multiply_at(weights: Any, bias: Any, inputs: Any, out: Any) -> None:
    groups = (out.shape[1] + OUTPUTS - 1) // OUTPUTS
    biases = carray(_pointer(bias), (groups * OUTPUTS,), np.float32)
    multiply(inputs, _weights_at(weights, groups, inputs), biases, out)


@kernel
def _run_layers(
    wanted: Any,
    addresses: Any,
    inner: Any,
    qk_norm: Any,
    eps: Any,
    scale: Any,
    residual: Any,
    entering: Any,
    taps: Any,
    tapped: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    arrays: Any,
    keys: Any,
    values: Any,
    query: Any,
) -> Any:
    """Runs layers over rows; their weights are of the kind of `entering`.

    Args:
        entering: [rows, width], the first layer's input in place of the norm of the residual stream; no rows: that.
        taps: [layers], rows of `tapped` [taps, rows, hidden]; -1: none.
    """
    rows, hidden = residual.shape
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[2]
    kind = entering.dtype
    normed, delta = np.empty((rows, hidden), kind), np.empty((rows, hidden), kind)
    qkv = np.empty((rows, (heads + 2 * kv_heads) * head_dim), kind)
    attended = np.empty((rows, heads * head_dim), kind)
    gate_up, activated = np.empty((rows, 2 * inner), kind), np.empty((rows, inner), kind)
    for number in range(wanted.shape[0]):
        layer = wanted[number]
        at = addresses[layer]
        input_norm = carray(_pointer(at[_INPUT_NORM]), (hidden,), np.float32)
        post_norm = carray(_pointer(at[_POST_NORM]), (hidden,), np.float32)
        query_norm = carray(_pointer(at[_QUERY_NORM]), (qk_norm,), np.float32)
        key_norm = carray(_pointer(at[_KEY_NORM]), (qk_norm,), np.float32)
        if number:
            add_rms_norm_rows(residual, delta, input_norm, eps, normed)
        else:
            rms_norm_rows(residual, input_norm, eps, normed)
        if taps[layer] >= 0:
            _copy(residual.reshape(-1), tapped[taps[layer]].reshape(-1))
        _multiply_at(at[_QKV], at[_QKV + 1], normed if number or not len(entering) else entering, qkv)
        project_rows(qkv, query_norm, key_norm, eps, cos, sin, slots, keys[layer], values[layer], query)
        attend_rows(query, keys[layer], values[layer], arrays, scale, attended)
        _multiply_at(at[_OUT], at[_OUT + 1], attended, delta)
        add_rms_norm_rows(residual, delta, post_norm, eps, normed)
        _multiply_at(at[_GATE_UP], at[_GATE_UP + 1], normed, gate_up)
        silu_mul_rows(gate_up, activated)
        _multiply_at(at[_DOWN], at[_DOWN + 1], activated, delta)
    return delta


class FusedLayers:
    """All layers of a model, run by one compiled call.

    Args:
        layers: Of one shape, but for the width that the first one takes.
        inner: Width of their MLPs.
        eps: Of their norms.
        scale: Of attention scores.
    """

    def __init__(self, layers: Sequence[LlamaLayer], inner: int, eps: np.float32, scale: np.float32) -> None:
        arrays = [_arrays(layer) for layer in layers]
        # The addresses are good for as long as the arrays live.
        self._arrays = arrays
        self._addresses = np.array([[each.ctypes.data for each in of] for of in arrays], np.int64)
        self._qk_norm = len(arrays[0][_QUERY_NORM])
        self._inner, self._eps, self._scale = inner, eps, scale

    def run(
        self,
        wanted: Sequence[int],
        residual: npt.NDArray[np.float32],
        entering: npt.NDArray[Any],
        taps: Sequence[int],
        rope: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
        batch: Batch,
        cache: CpuKVCache,
        num_heads: int,
    ) -> tuple[npt.NDArray[Any], dict[int, torch.Tensor]]:
        """Runs layers over rows, and writes their KV.

        Args:
            wanted: Layers, in the order in which they run.
            residual: float32 [rows, hidden], the residual stream; what the last layer adds to it is returned.
            entering: [rows, width], the first layer's input, of the weights' kind; no rows: the residual's norm is.
            taps: Layers before which it is kept.
            rope: Cosines and sines, [rows, head_dim / 2] each.

        Returns:
            [rows, hidden], of the weights' kind, still to be added to the residual stream; and it before each tap.
        """
        assert len(wanted), "at least one layer runs"
        keys, values = as_array(cache.keys), as_array(cache.values)
        places = np.full(len(self._addresses), -1, np.int64)
        places[list(taps)] = np.arange(len(taps))
        tapped = np.empty((len(taps), *residual.shape), np.float32)
        query = np.empty((len(residual), num_heads, values.shape[-1]), np.float32)
        delta = _run_layers(
            np.array(wanted, np.int64), self._addresses, self._inner, self._qk_norm, self._eps, self._scale,
            residual, entering, places, tapped, *rope, batch.slots, batch.attention_arrays, keys, values, query,
        )  # fmt: skip
        return delta, dict(zip(taps, torch.from_numpy(tapped), strict=True))


def _arrays(layer: LlamaLayer) -> list[npt.NDArray[Any]]:
    """A layer's arrays, in the order of the columns above."""
    norms = (layer.input_norm, layer.query_norm, layer.key_norm, layer.post_norm)
    arrays: list[npt.NDArray[Any]] = [norm.numpy() for norm in norms]
    for linear in layer.linears:
        assert isinstance(linear, PackedLinear), "of the CPU's platform"
        arrays += [linear.product.weights, linear.product.bias]
    return arrays
