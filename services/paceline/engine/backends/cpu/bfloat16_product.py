"""Matrix products of bfloat16 rows and weights on CPUs that multiply bfloat16 themselves (AVX512-BF16).

With few rows a step waits for its weights. oneDNN's kernels let the core wait for memory in one moment and for
arithmetic in the next, so that 8 rows took 1.4 times as long as one. Here the weights to come are asked for while those
at hand are multiplied: few rows take as long as one, and the whole stream of weights comes faster than oneDNN reads it.

Weights are packed for 32 outputs at a time, input pair by input pair, which is the order in which they are read. A sum
runs over its input pairs in order, in float32, whatever the other rows are and whichever thread computes it: a row has
the same bits in any batch. It has them, too, whether the CPU's instruction for pairs adds them or two fused
multiply-adds do, whichever the CPU does faster: bfloat16 products are exact in float32, and the order is the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.engine.backends.cpu.openmp import in_parallel
from paceline.engine.backends.cpu.simd import LANES, array_data, fused_multiply_add, load_vector, splat, store_vector
from paceline.kernel_cache import kernel

OUTPUTS = 2 * LANES
"""Outputs that are computed side by side."""
TILE_ROWS = 14
"""Rows that are computed side by side: their 28 sums, two vectors of weights and one input fill the registers. A tile
costs as much as four rows before its first one."""
BLOCK_PAIRS = 160
"""Input pairs whose weights, 20 KiB, stay in the first cache while one tile of rows after another is multiplied."""
AHEAD = 2048
"""Words between the weights at hand and those that are asked for, 8 KiB: the time that memory takes to answer."""
TAKEN_AT_ONCE = 64 * 1024
"""Words of weights, 256 KiB, that a thread takes at a time; one that is interrupted leaves the rest to the others."""

_FLOAT, _WORD, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)

Words = npt.NDArray[np.uint32]


PAIR_BY_PAIR = llvmlite.binding.get_host_cpu_name().startswith("znver")
"""Whether products go by the instruction: on an Intel core it reached half the FLOP/s of fused multiply-adds, weights
in the cache; on AMD's, where it has always been used, the two were not compared."""


@cache
def is_supported() -> bool:
    """Says whether this CPU, and the compiler, know the instruction."""
    if not llvmlite.binding.get_host_cpu_features().get("avx512bf16", False):
        return False
    try:
        llvmlite.binding.initialize_native_asmparser()
    except RuntimeError:
        return False
    return True


def pack(weight: npt.NDArray[np.uint16]) -> Words:
    """Packs the bits of a weight [out, in] for `multiply`; outputs and inputs are filled up with zeros.

    Returns:
        [ceil(out / 32), ceil(in / 2), 2, 16] words of two inputs each, the first one in the lower half.
    """
    outputs, inputs = weight.shape
    groups, pairs = -(-outputs // OUTPUTS), -(-inputs // 2)
    filled = np.zeros((groups * OUTPUTS, 2 * pairs), np.uint16)
    filled[:outputs, :inputs] = weight
    packed = _aligned((groups, pairs, 2, LANES))
    packed[:] = filled.view(np.uint32).reshape(groups, 2, LANES, pairs).transpose(0, 3, 1, 2)
    return packed


def _aligned(shape: tuple[int, ...]) -> Words:
    """Words that begin with a line of the cache, so that no vector lies on two of them."""
    size = int(np.prod(shape))
    room = np.empty(size + LANES, np.uint32)
    skipped = -room.ctypes.data % (4 * LANES) // 4
    return room[skipped : skipped + size].reshape(shape)


def _prefetch(builder: Any, pointer: Any) -> None:
    address = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [address, _WORD, _WORD, _WORD])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # To be read, and kept near.
    builder.call(function, [builder.bitcast(pointer, address), _WORD(0), _WORD(3), _WORD(1)])


def _splat_word(builder: Any, word: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(vector, vector, ir.Constant(_WORDS, [0] * LANES))


class _PairByPair:
    """Total + weights * inputs by the instruction for that; inputs are words of two, as weights are."""

    per_pair = 1

    @staticmethod
    def take_apart(builder: Any, words: Any) -> Any:
        """What `add` takes of words of weights."""
        del builder
        return words

    @staticmethod
    def add(builder: Any, total: Any, weights: Any, at: Any) -> Any:
        """Adds the products with the pair at a place; written as text since llvmlite lacks LLVM's bfloat16 type."""
        inputs = _splat_word(builder, builder.load(at))
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _WORDS])
        instruction = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False)
        return builder.call(instruction, [total, weights, inputs])


class _OneByOne:
    """The same sums by fused multiply-adds, whose products of two bfloat16 are exact; inputs are float32."""

    per_pair = 2

    @staticmethod
    def take_apart(builder: Any, words: Any) -> Any:
        """What `add` takes of words of weights: the upper halves, which the instruction adds first, and the lower."""
        upper = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
        lower = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
        return [builder.bitcast(half, _FLOATS) for half in (upper, lower)]

    @staticmethod
    def add(builder: Any, total: Any, weights: Any, at: Any) -> Any:
        """Adds the products with the pair at a place."""
        for place, half in zip((1, 0), weights, strict=True):
            value = builder.load(builder.gep(at, [ir.Constant(_WORD, place)]))
            total = fused_multiply_add(builder, half, splat(builder, value), total)
        return total


def _multiply_rows(builder: Any, how: Any, inputs: Any, weights: Any, count: Any, totals: Any, aheads: Any) -> None:
    """Emits the loop over `count` input pairs for as many rows as there are `inputs`; `totals` are [rows, 2, 16]."""

    def vector(pointer: Any, index: int) -> Any:
        return builder.gep(pointer, [ir.Constant(count.type, LANES * index)])

    places = [vector(total, half) for total in totals for half in (0, 1)]
    starts = [load_vector(builder, place) for place in places]
    before = builder.block
    head, body, done = (builder.append_basic_block(f"product.{name}") for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(count.type)
    sums = [builder.phi(_FLOATS) for _ in starts]
    builder.cbranch(builder.icmp_signed("<", index, count), body, done)
    builder.position_at_end(body)
    offset = builder.mul(index, ir.Constant(count.type, OUTPUTS))
    here = builder.gep(weights, [offset])
    words = [builder.load(builder.bitcast(vector(here, half), _WORDS.as_pointer()), align=4) for half in (0, 1)]
    halves = [how.take_apart(builder, each) for each in words]
    for ahead in aheads:
        _prefetch(builder, builder.gep(ahead, [offset]))
    added: list[Any] = []
    pair_at = builder.mul(index, ir.Constant(count.type, how.per_pair))
    for row, at in enumerate(inputs):
        # Loaded where they are used: with all inputs loaded first, registers run out.
        pair = builder.gep(at, [pair_at])
        added += [how.add(builder, sums[2 * row + half], halves[half], pair) for half in (0, 1)]
    following = builder.add(index, ir.Constant(count.type, 1))
    branched_from = builder.block
    builder.branch(head)
    index.add_incoming(ir.Constant(count.type, 0), before)
    index.add_incoming(following, branched_from)
    for total, start, value in zip(sums, starts, added, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(value, branched_from)
    builder.position_at_end(done)
    for total, place in zip(sums, places, strict=True):
        store_vector(builder, total, place)


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
    aheads: Any,
) -> Any:
    """Adds the products of `count` input pairs to totals[totals_at + row * OUTPUTS :] of 1 to TILE_ROWS rows.

    `inputs` are words of two or float32, and say by that how to multiply. Those of a row begin at `inputs_at + row *
    step`; `aheads` are places in the weights to ask for, which move on as `weights_at` does.
    """
    intp = types.intp
    signature = types.void(inputs, intp, intp, intp, weights, intp, intp, totals, intp, aheads)

    how = _OneByOne if inputs.dtype == types.float32 else _PairByPair

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def at(index: int, offset: Any) -> Any:
            return array_data(context, builder, sig.args[index], args[index], offset)

        ended = builder.append_basic_block("tile.ended")
        switch = builder.switch(args[3], ended)
        for size in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block(f"tile.{size}")
            switch.add_case(ir.Constant(args[3].type, size), block)
            builder.position_at_end(block)
            row_numbers = [ir.Constant(args[2].type, row) for row in range(size)]
            rows_at = [at(0, builder.add(args[1], builder.mul(row, args[2]))) for row in row_numbers]
            totals_at = [at(7, builder.add(args[8], ir.Constant(args[8].type, OUTPUTS * row))) for row in range(size)]
            ahead = [at(4, place) for place in cgutils.unpack_tuple(builder, args[9])]
            _multiply_rows(builder, how, rows_at, at(4, args[5]), args[6], totals_at, ahead)
            builder.branch(ended)
        builder.position_at_end(ended)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic  # type: ignore[untyped-decorator]
def _store_rounded(typing: Any, totals: Any, totals_at: Any, out: Any, out_at: Any) -> Any:
    """Rounds LANES float32 values to bfloat16 bits, to the nearest and ties to even."""
    signature = types.void(totals, types.intp, out, types.intp)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def words(value: int) -> Any:
            return ir.Constant(_WORDS, [value] * LANES)

        values = load_vector(builder, array_data(context, builder, sig.args[0], args[0], args[1]))
        bits = builder.bitcast(values, _WORDS)
        odd = builder.and_(builder.lshr(bits, words(16)), words(1))
        rounded = builder.lshr(builder.add(builder.add(bits, words(0x7FFF)), odd), words(16))
        halves = ir.VectorType(_HALF, LANES)
        target = array_data(context, builder, sig.args[2], args[2], args[3])
        builder.store(builder.trunc(rounded, halves), builder.bitcast(target, halves.as_pointer()), align=2)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic  # type: ignore[untyped-decorator]
def _copy_lanes(typing: Any, source: Any, source_at: Any, target: Any, target_at: Any) -> Any:
    """Copies LANES float32 values; as a loop over rows it would take a fifth of the time of a product."""
    signature = types.void(source, types.intp, target, types.intp)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = load_vector(builder, array_data(context, builder, sig.args[0], args[0], args[1]))
        store_vector(builder, values, array_data(context, builder, sig.args[2], args[2], args[3]))
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
    pairs = weights.shape[1]
    flat_inputs, flat_weights = inputs.reshape(-1), weights.reshape(-1)
    # Tiles of about the same size: a row or two alone would take as long as six.
    num_tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tile_rows = (rows + num_tiles - 1) // num_tiles
    for first in range(0, pairs, BLOCK_PAIRS):
        count, at = min(BLOCK_PAIRS, pairs - first), (group * pairs + first) * OUTPUTS
        for row in range(0, rows, tile_rows):
            size, into = min(tile_rows, rows - row), row * OUTPUTS
            from_input = row * row_step + first * (row_step // pairs)
            if rows <= TILE_ROWS:
                # A lone tile reads on as it goes.
                aheads = (at + AHEAD, at + AHEAD + LANES)
                _multiply_tile(flat_inputs, from_input, row_step, size, flat_weights, at, count, totals, into, aheads)
            else:
                # Of several, the first two ask for the next block, half of it each.
                half = count * OUTPUTS + (LANES if row else 0) if row <= tile_rows else 0
                _multiply_tile(
                    flat_inputs, from_input, row_step, size, flat_weights, at, count, totals, into, (at + half,)
                )


@kernel
def _store_group(totals: Any, group: Any, out: Any) -> None:
    """Rounds totals[rows * OUTPUTS] into out[:, group * OUTPUTS : (group + 1) * OUTPUTS]."""
    rows, outputs = out.shape
    wanted = min(OUTPUTS, outputs - group * OUTPUTS)
    flat, rounded = out.reshape(-1), np.empty(OUTPUTS, np.uint16)
    for row in range(rows):
        place, at = row * outputs + group * OUTPUTS, row * OUTPUTS
        if wanted == OUTPUTS:
            _store_rounded(totals, at, flat, place)
            _store_rounded(totals, at + LANES, flat, place + LANES)
        else:
            _store_rounded(totals, at, rounded, 0)
            _store_rounded(totals, at + LANES, rounded, LANES)
            flat[place : place + wanted] = rounded[:wanted]


@kernel
def _multiply_share(inputs: Any, weights: Any, bias: Any, out: Any, taken: Any, _index: Any, num_threads: Any) -> None:
    rows = len(inputs)
    groups, pairs = weights.shape[:2]
    at_once = max(1, min(TAKEN_AT_ONCE // (pairs * OUTPUTS), groups // (4 * num_threads)))
    totals = np.empty(rows * OUTPUTS, np.float32)
    start = _take(taken, at_once)
    while start < groups:
        for group in range(start, min(start + at_once, groups)):
            for row in range(rows):
                _copy_lanes(bias, group * OUTPUTS, totals, row * OUTPUTS)
                _copy_lanes(bias, group * OUTPUTS + LANES, totals, row * OUTPUTS + LANES)
            _multiply_group(inputs, weights, group, totals)
            _store_group(totals, group, out)
        start = _take(taken, at_once)


@kernel
def _as_floats(words: Any) -> Any:
    """The inputs of words [rows, pairs] as float32 [rows, 2 * pairs]."""
    rows, pairs = words.shape
    bits = np.empty((rows, 2 * pairs), np.uint32)
    for row in range(rows):
        for pair in range(pairs):
            word = np.uint32(words[row, pair])
            bits[row, 2 * pair] = word << np.uint32(16)
            bits[row, 2 * pair + 1] = word & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


@kernel
def multiply(inputs: Any, weights: Any, bias: Any, out: Any) -> None:
    """Fills out[rows, out] with the bfloat16 bits of inputs W^T + bias.

    Args:
        inputs: [rows, in / 2] words of two bfloat16 inputs each, the first one in the lower half.
        weights: What `pack` made of W.
        bias: float32, filled up with zeros to whole groups of 32 outputs.
        out: uint16 [rows, out].
    """
    if PAIR_BY_PAIR:
        in_parallel(_multiply_share, (inputs, weights, bias, out, np.zeros(1, np.int64)))
    else:
        in_parallel(_multiply_share, (_as_floats(inputs), weights, bias, out, np.zeros(1, np.int64)))
