"""Matrix products of few rows: weights are packed once, and a row has the same bits on every CPU and in any batch.

With few rows a step waits for its weights. A library's kernels let the core wait for memory in one moment and for
arithmetic in the next; here the weights to come are asked for while those at hand are multiplied, so that few rows take
about as long as one.

Weights are bfloat16 or float32, packed for 32 outputs at a time, input after input, which is the order in which they
are read. A sum runs over its inputs in one order, in float32, whatever the other rows are, whichever thread computes it
and whatever instructions the CPU has: fused multiply-adds in registers of any width, or the instruction for pairs of
bfloat16 (AVX512-BF16). Products of two bfloat16 numbers are exact in float32, so that these round alike.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from paceline.engine.backends.cpu.kv import as_array
from paceline.engine.backends.cpu.openmp import in_parallel
from paceline.engine.backends.cpu.simd import (
    CPU_NAME,
    FEATURES,
    LANES,
    WIDE,
    array_data,
    load_vector,
    multiply_add,
    splat,
    store_vector,
    to_float32,
)
from paceline.kernel_cache import expanded, kernel

OUTPUTS = 2 * LANES
"""Outputs that are packed side by side, in two vectors."""
BLOCK_WORDS = 160
"""Words of an output whose weights, 20 KiB for all, stay in the first cache while tile after tile is multiplied."""
AHEAD = 2048
"""Words between the weights at hand and those that are asked for, 8 KiB: the time that memory takes to answer."""
TAKEN_AT_ONCE = 64 * 1024
"""Words of weights, 256 KiB, that a thread takes at a time; one that is interrupted leaves the rest to the others."""

_FLOAT, _WORD, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)


def _knows_pairs() -> bool:
    """Whether products of bfloat16 go by the instruction for pairs.

    On an Intel core it reached half the FLOP/s of fused multiply-adds, weights in the cache; on AMD's, where it has
    always been used, the two were not compared.
    """
    if "+avx512bf16" not in FEATURES:
        return False
    try:
        llvmlite.binding.initialize_native_asmparser()
    except RuntimeError:
        return False
    return bool(CPU_NAME.startswith("znver"))


PAIR_BY_PAIR = _knows_pairs()
TILE_ROWS = 14 if PAIR_BY_PAIR else 12 if WIDE else 6
"""Rows that are computed side by side: their sums, the weights and an input fill the registers. Without the instruction
for pairs both halves of weights are there."""
WHOLE_ROWS = TILE_ROWS if WIDE else 2
"""Rows of which both vectors of outputs fit into the registers at once; of more, one goes after the other."""


class Product:
    """Weight [out, in] and bias [out] of a linear layer, packed.

    Attributes:
        weights: [ceil(out / 32), words of an output, 2, 16]: float32, or uint32 words of two bfloat16 inputs each, the
            first one in the lower half; outputs and inputs are filled up with zeros.
        bias: float32, filled up with zeros to whole groups of 32 outputs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Packs a weight in bfloat16 or float32; it may be dropped afterwards."""
        self._outputs, inputs = weight.shape
        wide = weight.dtype == torch.float32
        shape = -(-self._outputs // OUTPUTS), inputs if wide else -(-inputs // 2), 2, LANES
        self.weights = _aligned(shape, np.float32 if wide else np.uint32)
        _pack(as_array(weight.contiguous()), self.weights)
        self.bias = np.zeros(OUTPUTS * len(self.weights), np.float32)
        if bias is not None:
            self.bias[: len(bias)] = bias.to(torch.float32).numpy()

    def __call__(self, rows: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """[rows, in] -> [rows, out] of a kind; both bfloat16 or float32."""
        out = torch.empty((len(rows), self._outputs), dtype=kind)
        multiply(as_array(rows.contiguous()), self.weights, self.bias, as_array(out))
        return out


def _aligned(shape: tuple[int, ...], kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Room that begins with a line of the cache, so that no vector lies on two of them."""
    size = int(np.prod(shape))
    room = np.empty(size + LANES, kind)
    skipped = -room.ctypes.data % (4 * LANES) // 4
    return room[skipped : skipped + size].reshape(shape)


def _packed_word(output: Any, index: Any, packed: Any) -> Any:
    """Word `index` of the weights of an output, as `packed` holds it; compiled code only."""
    raise NotImplementedError


@overload(_packed_word)  # type: ignore[untyped-decorator]
def _packed_word_of(output: Any, index: Any, packed: Any) -> Any:
    def single(output: Any, index: Any, packed: Any) -> Any:
        return output[index]

    def pair(output: Any, index: Any, packed: Any) -> Any:
        word = np.uint32(output[2 * index])
        if 2 * index + 1 < len(output):
            word |= np.uint32(output[2 * index + 1]) << np.uint32(16)
        return word

    return single if packed.dtype == types.float32 else pair


@kernel
def _pack_share(weight: Any, packed: Any, first: Any, step: Any) -> None:
    groups, words = packed.shape[:2]
    for group in range(first, groups, step):
        for column in range(OUTPUTS):
            output = group * OUTPUTS + column
            half, lane = column // LANES, column % LANES
            if output < len(weight):
                for word in range(words):
                    packed[group, word, half, lane] = _packed_word(weight[output], word, packed)
            else:
                packed[group, :, half, lane] = 0


@kernel
def _pack(weight: Any, packed: Any) -> None:
    in_parallel(_pack_share, (weight, packed))


def _prefetch(builder: Any, pointer: Any) -> None:
    address = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [address, _WORD, _WORD, _WORD])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # To be read, and kept near.
    builder.call(function, [builder.bitcast(pointer, address), _WORD(0), _WORD(3), _WORD(1)])


class _Pairs:
    """Words of two bfloat16 weights by words of two inputs, by the instruction for that."""

    inputs_a_word = 1
    inputs_in_order = (0,)

    @staticmethod
    def weights(builder: Any, place: Any, index: int) -> Any:
        """The vector at a place that is multiplied by the input `index` of a word."""
        del index
        return builder.load(builder.bitcast(place, _WORDS.as_pointer()), align=4)

    @staticmethod
    def add(builder: Any, total: Any, weights: Any, at: Any) -> Any:
        """Total + weights * the input at a place; written as text since llvmlite lacks LLVM's bfloat16 type."""
        word = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), builder.load(at), ir.Constant(_WORD, 0))
        inputs = builder.shuffle_vector(word, word, ir.Constant(_WORDS, [0] * LANES))
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _WORDS])
        instruction = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False)
        return builder.call(instruction, [total, weights, inputs])


class _Halves:
    """The same sums by fused multiply-adds: upper halves first, as the instruction has it; inputs are float32."""

    inputs_a_word = 2
    inputs_in_order: tuple[int, ...] = (1, 0)

    @staticmethod
    def weights(builder: Any, place: Any, index: int) -> Any:
        """See `_Pairs`."""
        words = builder.load(builder.bitcast(place, _WORDS.as_pointer()), align=4)
        mask, shift = ir.Constant(_WORDS, [0xFFFF0000] * LANES), ir.Constant(_WORDS, [16] * LANES)
        return builder.bitcast(builder.and_(words, mask) if index else builder.shl(words, shift), _FLOATS)

    @staticmethod
    def add(builder: Any, total: Any, weights: Any, at: Any) -> Any:
        """See `_Pairs`."""
        return multiply_add(builder, weights, splat(builder, builder.load(at)), total)


class _Floats(_Halves):
    """float32 weights and inputs."""

    inputs_a_word = 1
    inputs_in_order = (0,)

    @staticmethod
    def weights(builder: Any, place: Any, index: int) -> Any:
        """See `_Pairs`."""
        del index
        return load_vector(builder, place)


def _form(inputs: Any, weights: Any) -> Any:
    """How arrays of these types are multiplied."""
    if weights.dtype == types.float32:
        return _Floats
    return _Halves if inputs.dtype == types.float32 else _Pairs


def _multiply_rows(
    builder: Any, form: Any, inputs: Any, weights: Any, count: Any, totals: Any, aheads: Any, stride: Any
) -> None:
    """Emits the loop over `count` words of weights, for all rows and all vectors of outputs.

    Args:
        inputs: Places of the rows' inputs.
        weights: Places of the vectors' weights.
        totals: Places of the sums, `[rows][vectors]`.
        aheads: Places in the weights to ask for.
        stride: How far these move on with every word.
    """
    places = [place for row in totals for place in row]
    starts = [load_vector(builder, place) for place in places]
    before = builder.block
    head, body, done = (builder.append_basic_block(f"product.{name}") for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(count.type)
    phis = [builder.phi(_FLOATS) for _ in starts]
    builder.cbranch(builder.icmp_signed("<", index, count), body, done)
    builder.position_at_end(body)
    offset = builder.mul(index, ir.Constant(count.type, OUTPUTS))
    for ahead in aheads:
        _prefetch(builder, builder.gep(ahead, [builder.mul(index, stride)]))
    first_input = builder.mul(index, ir.Constant(count.type, form.inputs_a_word))
    sums, rows, numbers = list(phis), range(len(inputs)), form.inputs_in_order
    vectors = {n: [form.weights(builder, builder.gep(place, [offset]), n) for place in weights] for n in numbers}
    # Rows of many registers side by side, or weights of few: otherwise both halves of all weights are held at once.
    order = [(row, n) for row in rows for n in numbers] if WIDE else [(row, n) for n in numbers for row in rows]
    for row, number in order:
        # Inputs are loaded where they are used: with all of them loaded first, registers run out.
        at = builder.gep(inputs[row], [builder.add(first_input, ir.Constant(count.type, number))])
        for column, vector in enumerate(vectors[number]):
            which = row * len(weights) + column
            sums[which] = form.add(builder, sums[which], vector, at)
    following = builder.add(index, ir.Constant(count.type, 1))
    branched_from = builder.block
    builder.branch(head)
    index.add_incoming(ir.Constant(count.type, 0), before)
    index.add_incoming(following, branched_from)
    for phi, start, total in zip(phis, starts, sums, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(total, branched_from)
    builder.position_at_end(done)
    for phi, place in zip(phis, places, strict=True):
        store_vector(builder, phi, place)


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_tile(
    typing: Any,
    inputs: Any,
    inputs_at: Any,
    step: Any,
    rows: Any,
    weights: Any,
    weights_at: Any,
    count: Any,
    totals: Any,
    totals_at: Any,
    columns: Any,
    aheads: Any,
    stride: Any,
) -> Any:
    """Adds the products of `count` words to totals[totals_at + row * OUTPUTS + column :][:16] of 1 to TILE_ROWS rows.

    Args:
        inputs: Flat; those of a row begin at `inputs_at + row * step`.
        weights: Flat; those of a column begin at `weights_at + column`.
        columns: (0, LANES), for up to WHOLE_ROWS rows, or one of them, for more.
        aheads: Places in the weights to ask for, which move on by `stride` with every word.
    """
    intp = types.intp
    signature = types.void(inputs, intp, intp, intp, weights, intp, intp, totals, intp, columns, aheads, intp)
    form = _form(inputs, weights)
    sizes = range(1, WHOLE_ROWS + 1) if len(columns) > 1 else range(WHOLE_ROWS + 1, TILE_ROWS + 1)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def at(index: int, *offsets: Any) -> Any:
            total = offsets[0]
            for offset in offsets[1:]:
                total = builder.add(total, offset)
            return array_data(context, builder, sig.args[index], args[index], total)

        def number(value: int) -> Any:
            return ir.Constant(args[1].type, value)

        places = cgutils.unpack_tuple(builder, args[9])
        ahead = [at(4, place) for place in cgutils.unpack_tuple(builder, args[10])]
        weights_at = [at(4, args[5], place) for place in places]
        ended = builder.append_basic_block("tile.ended")
        switch = builder.switch(args[3], ended)
        for size in sizes:
            block = builder.append_basic_block(f"tile.{size}")
            switch.add_case(number(size), block)
            builder.position_at_end(block)
            inputs_at = [at(0, args[1], builder.mul(number(row), args[2])) for row in range(size)]
            totals_at = [[at(7, args[8], number(OUTPUTS * row), place) for place in places] for row in range(size)]
            _multiply_rows(builder, form, inputs_at, weights_at, args[6], totals_at, ahead, args[11])
            builder.branch(ended)
        builder.position_at_end(ended)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic  # type: ignore[untyped-decorator]
def _move_lanes(typing: Any, source: Any, source_at: Any, target: Any, target_at: Any) -> Any:
    """Copies LANES float32 values; to bfloat16 bits they are rounded, to the nearest and ties to even."""
    signature = types.void(source, types.intp, target, types.intp)

    def words(value: int) -> Any:
        return ir.Constant(_WORDS, [value] * LANES)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = load_vector(builder, array_data(context, builder, sig.args[0], args[0], args[1]))
        place = array_data(context, builder, sig.args[2], args[2], args[3])
        if target.dtype == types.float32:
            store_vector(builder, values, place)
            return context.get_dummy_value()
        bits = builder.bitcast(values, _WORDS)
        odd = builder.and_(builder.lshr(bits, words(16)), words(1))
        rounded = builder.lshr(builder.add(builder.add(bits, words(0x7FFF)), odd), words(16))
        halves = ir.VectorType(_HALF, LANES)
        builder.store(builder.trunc(rounded, halves), builder.bitcast(place, halves.as_pointer()), align=2)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic  # type: ignore[untyped-decorator]
def _take(typing: Any, counter: Any, count: Any) -> Any:
    """Adds to counter[0] as one operation, whoever else does so at the moment; returns what it was."""
    signature = types.int64(counter, types.int64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = array_data(context, builder, sig.args[0], args[0], ir.Constant(ir.IntType(64), 0))
        return builder.atomic_rmw("add", place, args[1], "monotonic")

    return signature, codegen


@kernel
def _multiply_group(inputs: Any, weights: Any, group: Any, totals: Any) -> None:
    """Adds the products with the weights of 32 outputs to totals[rows * OUTPUTS]."""
    rows, row_step = inputs.shape
    words = weights.shape[1]
    flat_inputs, flat_weights = inputs.reshape(-1), weights.reshape(-1)
    # Tiles of about the same size: a row or two alone would take nearly as long as a whole tile.
    num_tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tile_rows = (rows + num_tiles - 1) // num_tiles
    # A pass goes over a block once: a tile, or a column of it where tiles are high.
    passes = num_tiles * (2 if tile_rows > WHOLE_ROWS else 1)
    for first in range(0, words, BLOCK_WORDS):
        count, at = min(BLOCK_WORDS, words - first), (group * words + first) * OUTPUTS
        # Each asks for its share of the next block; a lone one reads on as it goes.
        stride = OUTPUTS // passes if passes > 1 else OUTPUTS
        ahead = at + (count * OUTPUTS if passes > 1 else AHEAD)
        for row in range(0, rows, tile_rows):
            size, into = min(tile_rows, rows - row), row * OUTPUTS
            from_input = row * row_step + first * (row_step // words)
            if size > WHOLE_ROWS:
                for column in (0, LANES):
                    _multiply_tile(
                        flat_inputs, from_input, row_step, size, flat_weights, at, count, totals, into,
                        (column,), (ahead,), stride,
                    )  # fmt: skip
                    ahead += count * stride
            elif passes == 1:
                _multiply_tile(
                    flat_inputs, from_input, row_step, size, flat_weights, at, count, totals, into,
                    (0, LANES), (ahead, ahead + LANES), stride,
                )  # fmt: skip
            else:
                _multiply_tile(
                    flat_inputs, from_input, row_step, size, flat_weights, at, count, totals, into,
                    (0, LANES), (ahead,), stride,
                )  # fmt: skip
                ahead += count * stride


@kernel
def _store_group(totals: Any, group: Any, out: Any) -> None:
    """Moves totals[rows * OUTPUTS] to out[:, group * OUTPUTS : (group + 1) * OUTPUTS]."""
    rows, outputs = out.shape
    wanted = min(OUTPUTS, outputs - group * OUTPUTS)
    flat, moved = out.reshape(-1), np.empty(OUTPUTS, out.dtype)
    for row in range(rows):
        place, at = row * outputs + group * OUTPUTS, row * OUTPUTS
        if wanted == OUTPUTS:
            _move_lanes(totals, at, flat, place)
            _move_lanes(totals, at + LANES, flat, place + LANES)
        else:
            _move_lanes(totals, at, moved, 0)
            _move_lanes(totals, at + LANES, moved, LANES)
            for column in range(wanted):
                flat[place + column] = moved[column]


@kernel
def _multiply_share(inputs: Any, weights: Any, bias: Any, out: Any, taken: Any, _index: Any, num_threads: Any) -> None:
    rows = len(inputs)
    groups, words = weights.shape[:2]
    at_once = max(1, min(TAKEN_AT_ONCE // (words * OUTPUTS), groups // (4 * num_threads)))
    totals = np.empty(rows * OUTPUTS, np.float32)
    start = _take(taken, at_once)
    while start < groups:
        for group in range(start, min(start + at_once, groups)):
            for row in range(rows):
                _move_lanes(bias, group * OUTPUTS, totals, row * OUTPUTS)
                _move_lanes(bias, group * OUTPUTS + LANES, totals, row * OUTPUTS + LANES)
            _multiply_group(inputs, weights, group, totals)
            _store_group(totals, group, out)
        start = _take(taken, at_once)


@kernel
def as_floats(inputs: Any, width: Any) -> Any:
    """Inputs [rows, in] as float32 [rows, width], filled up with zeros."""
    rows, given = inputs.shape
    floats = np.empty((rows, width), np.float32)
    for row in range(rows):
        for index in range(given):
            floats[row, index] = to_float32(inputs[row, index])
        floats[row, given:] = 0.0
    return floats


@kernel
def as_pairs(inputs: Any, width: Any) -> Any:
    """bfloat16 inputs [rows, in] as words of two, [rows, width], filled up with zeros."""
    pairs = np.empty((len(inputs), width), np.uint32)
    for row in range(len(inputs)):
        for index in range(width):
            pairs[row, index] = _packed_word(inputs[row], index, pairs)
    return pairs


def _operands(inputs: Any, weights: Any) -> Any:
    """Inputs as they are multiplied by weights; compiled code only."""
    raise NotImplementedError


@overload(_operands)  # type: ignore[untyped-decorator]
def _operands_of(inputs: Any, weights: Any) -> Any:
    inputs_a_word = 1 if weights.dtype == types.float32 else 2

    def single(inputs: Any, weights: Any) -> Any:
        return as_floats(inputs, inputs_a_word * weights.shape[1])

    def pairs(inputs: Any, weights: Any) -> Any:
        return as_pairs(inputs, weights.shape[1])

    return pairs if PAIR_BY_PAIR and inputs.dtype == types.uint16 and weights.dtype == types.uint32 else single


@expanded
def multiply(inputs: Any, weights: Any, bias: Any, out: Any) -> None:
    """Fills out[rows, out] with inputs W^T + bias.

    Args:
        inputs: [rows, in], float32 or bfloat16 bits (uint16).
        weights: Of a `Product`, and so is the bias.
        bias: float32.
        out: float32, or uint16 for bfloat16 bits.
    """
    in_parallel(_multiply_share, (_operands(inputs, weights), weights, bias, out, np.zeros(1, np.int64)))
