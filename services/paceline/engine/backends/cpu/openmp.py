"""Runs compiled loops on the OpenMP threads that torch's linear layers use; knows addresses, no models.

A step alternates between packed linears, which torch gives to OpenMP, and loops of our own. Other threads for these,
numba's or Python's, would compete with the first ones for the same cores, and a thread that sleeps takes 50 to 100 us
to wake on a virtual machine, as long as the loop itself. So the loops go to OpenMP's threads while these still spin:
`GOMP_parallel` of the very library that torch has loaded, which LLVM's and Intel's OpenMP have as well. How many
threads there are is torch's number.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)
_WORK = ir.FunctionType(ir.VoidType(), [_POINTER])
_FORK = ir.FunctionType(ir.VoidType(), [_POINTER, _POINTER, _INT32, _INT32])
_COUNT = ir.FunctionType(_INT32, [])

_C_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)  # type: ignore[untyped-decorator]
def _call_alone(work: int, data: int, _threads: int, _flags: int) -> None:
    _C_WORK(work)(data)


_zero, _one = (ctypes.CFUNCTYPE(ctypes.c_int)(lambda number=number: number) for number in (0, 1))
_ALONE = {"GOMP_parallel": _call_alone, "omp_get_thread_num": _zero, "omp_get_num_threads": _one}


def _openmp() -> dict[str, Any]:
    """OpenMP's functions as torch has them; where it has none, such that the caller works alone."""
    try:
        # What a library depends on is searched with it.
        torch_cpu = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        return {name: getattr(torch_cpu, name) for name in _ALONE}
    except (AttributeError, OSError, StopIteration):
        return dict(_ALONE)


_FUNCTIONS = _openmp()
for _name, _function in _FUNCTIONS.items():
    llvmlite.binding.add_symbol(f"paceline_{_name}", ctypes.cast(_function, ctypes.c_void_p).value)


def _declared(module: Any, name: str, kind: Any) -> Any:
    return cgutils.get_or_insert_function(module, kind, f"paceline_{name}")


@intrinsic  # type: ignore[untyped-decorator]
def in_parallel(typing: Any, loop: Any, arguments: Any) -> Any:
    """Has every thread of a step run `loop(*arguments, index, count)`, and returns when all have.

    `loop` is compiled, raises nothing and returns None. Thread `index` of `count` is to take every `count`-th piece of
    the work from piece `index`; with one thread, the caller's, that is all of them.
    """
    wanted = (*arguments.types, types.int32, types.int32)
    loop.get_call_type(typing, wanted, {})
    compiled = loop.dispatcher.overloads[wanted]

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        module = builder.module
        context.add_linking_libs([compiled.library])
        data = cgutils.alloca_once_value(builder, values[1])
        work = ir.Function(module, _WORK, module.get_unique_name("paceline_work"))
        work.linkage = "internal"
        inside = ir.IRBuilder(work.append_basic_block())
        held = inside.load(inside.bitcast(work.args[0], data.type))
        own = [
            inside.call(_declared(module, name, _COUNT), []) for name in ("omp_get_thread_num", "omp_get_num_threads")
        ]
        unpacked = [inside.extract_value(held, index) for index in range(len(arguments.types))]
        callee = context.declare_function(module, compiled.fndesc)
        context.call_conv.call_function(inside, callee, types.none, wanted, [*unpacked, *own])
        inside.ret_void()
        started = [builder.bitcast(work, _POINTER), builder.bitcast(data, _POINTER), _INT32(0), _INT32(0)]
        builder.call(_declared(module, "GOMP_parallel", _FORK), started)
        return context.get_dummy_value()

    return types.none(loop, arguments), emit
