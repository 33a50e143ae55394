"""The threads of a step: every piece of a loop runs once, whatever the number of threads, and gives the same bits."""

import ctypes

import numpy as np
import pytest
import torch
from numba import njit

from paceline.engine.backends.cpu import openmp
from paceline.engine.backends.cpu.layer_kernels import silu_mul_rows
from paceline.engine.backends.cpu.openmp import in_parallel


@njit(error_model="numpy")
def _count_share(pieces, members, first, step):
    members[first] = step
    for piece in range(first, pieces.shape[0], step):
        pieces[piece] += 1


@njit(error_model="numpy")
def _count(pieces, members):
    in_parallel(_count_share, (pieces, members))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("pieces", [0, 1, 4, 1000])
def test_every_piece_is_done_once_by_as_many_threads_as_torch_has(threads, count, pieces):
    threads(count)
    done, members = np.zeros(pieces, np.int64), np.zeros(8, np.int64)
    _count(done, members)
    assert done.tolist() == [1] * pieces
    assert members.tolist() == [count] * count + [0] * (8 - count)


def test_the_threads_are_those_of_torch():
    assert {name: function.__name__ for name, function in openmp._FUNCTIONS.items()} == {
        name: name for name in openmp._ALONE
    }


def test_rows_have_the_same_bits_on_any_number_of_threads(threads):
    both = np.random.default_rng(0).normal(size=(7, 2 * 133)).astype(np.float32)
    outputs = []
    for count in (1, 2, 4):
        threads(count)
        outputs.append(np.zeros((7, 133), np.float32))
        silu_mul_rows(both, outputs[-1])
    assert outputs[0].any()
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


def test_without_openmp_the_caller_works_alone():
    calls = []
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(calls.append)
    openmp._call_alone(ctypes.cast(work, ctypes.c_void_p).value, 42, 0, 0)
    assert calls == [42]
    assert (openmp._ALONE["omp_get_thread_num"](), openmp._ALONE["omp_get_num_threads"]()) == (0, 1)
