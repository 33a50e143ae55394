"""Sixteen-lane float32 building blocks for the compiled CPU loops; knows arrays and offsets, no models.

LLVM does not keep partial sums of a plain loop in registers here, because it cannot prove that the arrays do
not overlap; written out as vector code the score loop ran five times faster. Every operation is a fused
multiply-add with one rounding (see `FUSES`), in a fixed order, so that a lane gives the same bits as the scalar form
of the same sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

LANES = 16

_TRIPLE, CPU_NAME, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
"""As numba compiles for: this machine's, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise."""
FEATURES = frozenset(_FEATURES.split(","))
WIDE = "+avx512f" in FEATURES
"""Whether there are 32 registers of 16 lanes; AVX2 has 16 of 8, NEON 32 of 4."""
FUSES = "+fma" in FEATURES or _TRIPLE.startswith(("aarch64", "arm64"))
"""Whether the CPU multiplies and adds with one rounding; else it rounds twice, and bits may differ from others'."""

_FLOAT = ir.FloatType()
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT_VECTOR = ir.VectorType(_INT32, LANES)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def array_data(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Pointer to element `offset` of a C-contiguous array seen as flat."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def load_vector(builder: Any, pointer: Any) -> Any:
    """LANES float32 values, widened when the pointer is to bfloat16 bits."""
    if pointer.type.pointee == _FLOAT:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    narrow = builder.load(builder.bitcast(pointer, ir.VectorType(_INT16, LANES).as_pointer()), align=2)
    wide = builder.zext(narrow, _INT_VECTOR)
    return builder.bitcast(builder.shl(wide, ir.Constant(_INT_VECTOR, [16] * LANES)), _VECTOR)


def store_vector(builder: Any, vector: Any, pointer: Any) -> None:
    """Stores LANES float32 values."""
    builder.store(vector, builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def splat(builder: Any, scalar: Any) -> Any:
    """LANES times the same float32 value."""
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    mask = ir.Constant(_INT_VECTOR, [0] * LANES)
    return builder.shuffle_vector(vector, vector, mask)


def multiply_add(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """Left * right + addend of scalars or vectors, rounded once where the CPU can."""
    if not FUSES:
        # The library's function for it takes a hundred times as long.
        return builder.fadd(builder.fmul(left, right), addend)
    if left.type == _FLOAT:
        return builder.fma(left, right, addend)
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [left, right, addend])


def _accumulate(builder: Any, count: Any, starts: Any, scalars: Any, vectors: Any, stride: Any) -> Any:
    """Emits, for every chain k, `starts[k] + sum_i scalars[k][i] * vectors[k][i * stride : ][:LANES]`, i in order.

    A chain waits four cycles for each of its additions; several at once fill them. What several have in common is read
    once.
    """
    zero = ir.Constant(count.type, 0)
    before = builder.block
    head = builder.append_basic_block("sum.head")
    body = builder.append_basic_block("sum.body")
    done = builder.append_basic_block("sum.done")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(count.type)
    totals = [builder.phi(_VECTOR) for _ in starts]
    builder.cbranch(builder.icmp_signed("<", index, count), body, done)
    builder.position_at_end(body)
    factors = {at: splat(builder, builder.load(builder.gep(at, [index]))) for at in dict.fromkeys(scalars)}
    offset = builder.mul(index, stride)
    loaded = {at: load_vector(builder, builder.gep(at, [offset])) for at in dict.fromkeys(vectors)}
    terms = zip([factors[at] for at in scalars], [loaded[at] for at in vectors], totals, strict=True)
    sums = [multiply_add(builder, *term) for term in terms]
    following = builder.add(index, ir.Constant(count.type, 1))
    builder.branch(head)
    index.add_incoming(zero, before)
    index.add_incoming(following, body)
    for total, start, added in zip(totals, starts, sums, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(added, body)
    builder.position_at_end(done)
    return totals


def _of_rows(builder: Any, pointer: Any, rows: Any, step: Any) -> list[Any]:
    """The pointer `step` elements further on for every row after another."""
    return [builder.gep(pointer, [builder.mul(row, step)]) for row in cgutils.unpack_tuple(builder, rows)]


def _vectors(builder: Any, pointers: Any, count: int, index_type: Any) -> list[Any]:
    """The next `count` vectors from each pointer on."""
    offsets = [ir.Constant(index_type, LANES * number) for number in range(count)]
    return [builder.gep(pointer, [offset]) for pointer in pointers for offset in offsets]


def side_by_side(rows: Any) -> Any:
    """How many vectors are added up at once for each of a few rows, as a tuple of that length; compiled code only."""
    raise NotImplementedError


@overload(side_by_side)  # type: ignore[untyped-decorator]
def _side_by_side(rows: Any) -> Any:
    # Sums wait for their own additions one by one: eight registers of them keep a core busy. Of sixteen registers, more
    # sums would leave too few for what is added.
    numbers = tuple(range(4 if WIDE else 4 // len(rows)))

    def constant(rows: Any) -> Any:
        return numbers

    return constant


@intrinsic  # type: ignore[untyped-decorator]
def dot_lanes(
    typing: Any,
    query: Any,
    query_at: Any,
    rows: Any,
    query_step: Any,
    keys: Any,
    blocks: Any,
    first: Any,
    numbers: Any,
    block_step: Any,
    keys_at: Any,
    length: Any,
    out: Any,
    out_at: Any,
    out_step: Any,
) -> Any:
    """Scores of a few rows in a few blocks k, all lanes j.

    out[out_at + row * out_step + k * LANES + j] = sum_d
        query[query_at + row * query_step + d] * keys[blocks[first + k] * block_step + keys_at + d * LANES + j]
    """
    intp = types.intp
    signature = types.void(
        query, intp, rows, intp, keys, blocks, intp, numbers, intp, intp, intp, out, intp, intp
    )  # fmt: skip

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start = array_data(context, builder, sig.args[0], args[0], args[1])
        queries = _of_rows(builder, start, args[2], args[3])
        places = []
        for number in cgutils.unpack_tuple(builder, args[7]):
            at = array_data(context, builder, sig.args[5], args[5], builder.add(args[6], number))
            block = (
                builder.sext(builder.load(at), args[8].type) if sig.args[5].dtype.bitwidth < 64 else builder.load(at)
            )
            offset = builder.add(builder.mul(block, args[8]), args[9])
            places.append(array_data(context, builder, sig.args[4], args[4], offset))
        scalars = [each for each in queries for _ in places]
        starts = [ir.Constant(_VECTOR, [0.0] * LANES)] * len(scalars)
        totals = _accumulate(
            builder, args[10], starts, scalars, places * len(queries), ir.Constant(args[10].type, LANES)
        )
        base = array_data(context, builder, sig.args[11], args[11], args[12])
        targets = _vectors(builder, _of_rows(builder, base, args[2], args[13]), len(places), args[12].type)
        for total, target in zip(totals, targets, strict=True):
            store_vector(builder, total, target)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic  # type: ignore[untyped-decorator]
def add_weighted_lanes(
    typing: Any,
    weights: Any,
    weights_at: Any,
    rows: Any,
    weights_step: Any,
    values: Any,
    values_at: Any,
    numbers: Any,
    count: Any,
    width: Any,
    out: Any,
    out_at: Any,
    out_step: Any,
) -> Any:
    """Adds weighted values to the outputs of a few rows in a few vectors k, all lanes j.

    out[out_at + row * out_step + k * LANES + j] +=
        sum_t weights[weights_at + row * weights_step + t] * values[values_at + k * LANES + t * width + j]
    """
    intp = types.intp
    signature = types.void(weights, intp, rows, intp, values, intp, numbers, intp, intp, out, intp, intp)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start = array_data(context, builder, sig.args[0], args[0], args[1])
        factors = _of_rows(builder, start, args[2], args[3])
        count = len(numbers)
        places = _vectors(builder, [array_data(context, builder, sig.args[4], args[4], args[5])], count, args[5].type)
        scalars = [each for each in factors for _ in places]
        base = array_data(context, builder, sig.args[9], args[9], args[10])
        targets = _vectors(builder, _of_rows(builder, base, args[2], args[11]), count, args[10].type)
        starts = [load_vector(builder, target) for target in targets]
        totals = _accumulate(builder, args[7], starts, scalars, places * len(factors), args[8])
        for total, target in zip(totals, targets, strict=True):
            store_vector(builder, total, target)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic  # type: ignore[untyped-decorator]
def fma(typing: Any, left: Any, right: Any, addend: Any) -> Any:
    """One lane of the vector forms above: left * right + addend."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return multiply_add(builder, *args)

    return signature, codegen


def to_float32(value: Any) -> Any:
    """An element of a float32 array, or of a uint16 one of bfloat16 bits, as float32; compiled code only."""
    raise NotImplementedError


def encode(value: Any, array: Any) -> Any:
    """A float32 value as an element of `array`: itself, or rounded to bfloat16 bits; compiled code only."""
    raise NotImplementedError


# numba compares the annotations of both levels too, so the inner functions repeat them.
@overload(to_float32)  # type: ignore[untyped-decorator]
def _to_float32(value: Any) -> Any:
    def widened(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    def unchanged(value: Any) -> Any:
        return value

    return widened if isinstance(value, types.Integer) else unchanged


@overload(encode)  # type: ignore[untyped-decorator]
def _encode(value: Any, array: Any) -> Any:
    def rounded(value: Any, array: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    def unchanged(value: Any, array: Any) -> Any:
        return value

    return rounded if isinstance(array.dtype, types.Integer) else unchanged
