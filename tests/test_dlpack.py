"""The capsule ABI: what ``take`` says of real producers, and that each deleter is called exactly once."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlpack_loader import dlpack
from dlpack_loader.dlpack import Capsule, take
from dlpack_loader.errors import DestinationBufferError, DestinationTypeError
from tests.strategies import Layout, LegacyProducer, Producer, layouts, shapes

NULL_INT64 = ctypes.POINTER(ctypes.c_int64)()

DTYPES: dict[str, tuple[int, int, int]] = {
    "bool": (6, 8, 1),
    "int8": (0, 8, 1),
    "int64": (0, 64, 1),
    "uint16": (1, 16, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "complex64": (5, 64, 1),
    "complex128": (5, 128, 1),
}


def placed(data: st.DataObject) -> tuple[Layout, str]:
    name = data.draw(st.sampled_from(list(DTYPES)))
    shape = data.draw(shapes(4, 4))
    return data.draw(layouts(shape, np.dtype(name).itemsize)), name


def strides_that_count(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """Strides of dimensions that are stepped through: those of size 1, and of memory without bytes, say nothing."""
    if strides is None or 0 in shape:
        return []
    return [(axis, stride) for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_facts_are_numpys(data: st.DataObject) -> None:
    layout, name = placed(data)
    array = layout.view(np.zeros(layout.nbytes, np.uint8), np.dtype(name))
    for producer in (array, Producer(array), LegacyProducer(array)):
        capsule = take(producer, stream=None)
        assert capsule.pointer == array.ctypes.data or not array.size
        assert (capsule.shape, capsule.dtype, capsule.device) == (array.shape, DTYPES[name], (1, 0))
        assert capsule.flags == 0
        if capsule.strides is None:
            assert array.flags.c_contiguous
        else:
            expected = tuple(stride // array.itemsize for stride in array.strides)
            assert strides_that_count(array.shape, capsule.strides) == strides_that_count(array.shape, expected)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_facts_are_torchs(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*DTYPES, "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"]))
    triple = {"bfloat16": (4, 16, 1), "float8_e4m3fn": (10, 8, 1), "float8_e8m0fnu": (14, 8, 1)} | DTYPES
    shape = data.draw(shapes(4, 4))
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.empty([size + 1 for size in shape], dtype=getattr(torch, name))[
        tuple(slice(1, None) for _ in shape)
    ].permute(list(order))
    capsule = take(tensor, stream=None)
    assert capsule.pointer == tensor.data_ptr() or 0 in shape
    assert (capsule.shape, capsule.dtype, capsule.device) == (tuple(tensor.shape), triple[name], (1, 0))
    assert strides_that_count(capsule.shape, capsule.strides) == strides_that_count(capsule.shape, tensor.stride())


def test_torchs_packed_pairs() -> None:
    assert take(torch.empty(3, dtype=torch.float4_e2m1fn_x2), stream=None).dtype == (17, 4, 2)


def test_versioned_and_legacy_producers() -> None:
    array = np.zeros(3)
    modern, legacy = Producer(array), LegacyProducer(array)
    assert take(modern, stream=None).version == (1, 0)
    assert modern.keywords == [{"max_version": (1, 3), "copy": False}]
    assert take(legacy, stream=None).version is None
    assert legacy.keywords == [{"stream": None}]


def test_the_stream_is_passed_on_and_none_is_left_out() -> None:
    modern, legacy = Producer(np.zeros(3)), LegacyProducer(np.zeros(3))
    take(modern, stream=7)
    assert modern.keywords == [{"max_version": (1, 3), "copy": False, "stream": 7}]
    take(legacy, stream=7)
    assert legacy.keywords == [{"stream": 7}]


def test_read_only_is_said_by_versioned_capsules_only() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert take(Producer(array), stream=None).flags == dlpack.READ_ONLY
    with pytest.raises(DestinationBufferError, match="refuses to export"):
        take(LegacyProducer(array), stream=None)


# The exported array is held by the capsule until the deleter is called: its reference count tells how often that was.


@pytest.mark.parametrize("kind", [Producer, LegacyProducer, lambda array: array])
def test_release_calls_the_deleter_once(kind: Callable[[Any], Any]) -> None:
    array = np.zeros(3)
    producer = kind(array)
    before = sys.getrefcount(array)
    capsule = take(producer, stream=None)
    states = [capsule.alive]
    assert sys.getrefcount(array) == before + 1
    capsule.release()
    states.append(capsule.alive)
    assert states == [True, False]
    assert sys.getrefcount(array) == before
    capsule.release()
    del capsule
    gc.collect()
    assert sys.getrefcount(array) == before


def test_garbage_collection_calls_the_deleter_once() -> None:
    array = np.zeros(3)
    before = sys.getrefcount(array)
    capsule = take(array, stream=None)
    alive = weakref.ref(capsule)
    cycle: list[Any] = [capsule]
    cycle.append(cycle)
    del capsule, cycle
    assert sys.getrefcount(array) == before + 1
    gc.collect()
    assert alive() is None
    assert sys.getrefcount(array) == before


def test_memory_lives_as_long_as_the_capsule() -> None:
    array = np.zeros(3)
    alive = weakref.ref(array)
    capsule = take(array, stream=None)
    del array
    assert alive() is not None
    capsule.release()
    assert alive() is None


def test_torch_memory_is_given_back() -> None:
    array = np.zeros(3)
    before = sys.getrefcount(array)
    capsule = take(torch.from_numpy(array), stream=None)
    assert sys.getrefcount(array) > before
    capsule.release()
    capsule.release()
    assert sys.getrefcount(array) == before


def _major(managed: dlpack._ManagedVersioned) -> None:
    managed.major = 2


def _many(managed: dlpack._ManagedVersioned) -> None:
    managed.tensor.ndim = 65


def _negative(managed: dlpack._ManagedVersioned) -> None:
    managed.tensor.ndim = -1


def _shapeless(managed: dlpack._ManagedVersioned) -> None:
    managed.tensor.shape = NULL_INT64


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (_major, "DLPack major version 2 is not understood"),
        (_many, "a DLPack tensor of 65 dimensions"),
        (_negative, "a DLPack tensor of -1 dimensions"),
        (_shapeless, "a DLPack tensor without a shape"),
    ],
)
def test_capsules_that_are_not_understood_are_deleted_once(
    patch: Callable[[dlpack._ManagedVersioned], None], text: str
) -> None:
    array = np.zeros(3)
    producer = Producer(array, patch)
    before = sys.getrefcount(array)
    with pytest.raises(DestinationBufferError) as caught:
        take(producer, stream=None)
    assert caught.value.message == text
    assert sys.getrefcount(array) == before
    del caught
    gc.collect()
    assert sys.getrefcount(array) == before


def test_byte_offset_is_added() -> None:
    def shift(managed: dlpack._ManagedVersioned) -> None:
        managed.tensor.data -= 24
        managed.tensor.byte_offset = 24

    array = np.zeros(3)
    assert take(Producer(array, shift), stream=None).pointer == array.ctypes.data


def test_an_offset_into_nothing_is_no_address() -> None:
    def unallocated(managed: dlpack._ManagedVersioned) -> None:
        managed.tensor.data = None
        managed.tensor.byte_offset = 24

    assert take(Producer(np.zeros(3), unallocated), stream=None).pointer == 0


def test_strides_may_be_missing() -> None:
    def compact(managed: dlpack._ManagedVersioned) -> None:
        managed.tensor.strides = NULL_INT64

    capsule = take(Producer(np.zeros((2, 3)), compact), stream=None)
    assert (capsule.shape, capsule.strides) == ((2, 3), None)


@pytest.mark.parametrize("scalar", [np.zeros(()), torch.zeros(()), LegacyProducer(np.zeros(()))])
def test_scalars_have_neither_shape_nor_strides(scalar: Any) -> None:
    capsule = take(scalar, stream=None)
    assert (capsule.shape, capsule.strides) == ((), None)
    assert capsule.pointer


@pytest.mark.parametrize("empty", [np.zeros((0, 3)), torch.zeros(0, 3)])
def test_empty_memory_keeps_its_shape(empty: Any) -> None:
    assert take(empty, stream=None).shape == (0, 3)


class Fails:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __dlpack__(self, **keywords: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "kind", [BufferError, RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError]
)
def test_a_producer_that_refuses(kind: type[Exception]) -> None:
    error = kind("not today")
    with pytest.raises(DestinationBufferError) as caught:
        take(Fails(error), stream=None)
    assert isinstance(caught.value, BufferError)
    assert caught.value.message == "the producer refuses to export its memory: not today"
    assert caught.value.__cause__ is error


def test_torchs_own_refusals() -> None:
    for tensor in (torch.zeros(2, requires_grad=True), torch.zeros(2, dtype=torch.complex64).conj()):
        with pytest.raises(DestinationBufferError, match="the producer refuses to export its memory"):
            take(tensor, stream=None)


@pytest.mark.parametrize("value", [object(), None, [1.0], 3, b"bytes"])
def test_objects_without_dlpack(value: Any) -> None:
    with pytest.raises(DestinationTypeError) as caught:
        take(value, stream=None)
    assert isinstance(caught.value, TypeError)
    assert caught.value.message == f"{type(value).__name__} has no __dlpack__"


@pytest.mark.parametrize("value", [None, 7, "dltensor", object()])
def test_something_else_than_a_capsule(value: Any) -> None:
    class Odd:
        def __dlpack__(self, **keywords: Any) -> Any:
            return value

    with pytest.raises(DestinationTypeError, match="did not return an unconsumed DLPack capsule"):
        take(Odd(), stream=None)


def test_a_capsule_is_consumed_once() -> None:
    array = np.zeros(3)
    before = sys.getrefcount(array)
    raw = array.__dlpack__(max_version=(1, 0))
    capsule = Capsule(raw)
    with pytest.raises(DestinationTypeError, match="did not return an unconsumed DLPack capsule"):
        Capsule(raw)
    capsule.release()
    del raw, capsule
    gc.collect()
    assert sys.getrefcount(array) == before


def test_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(dlpack._Tensor) == 48
    assert ctypes.sizeof(dlpack._Managed) == 64
    assert ctypes.sizeof(dlpack._ManagedVersioned) == 80
    assert dlpack._ManagedVersioned.tensor.offset == 32
    assert dlpack._Tensor.byte_offset.offset == 40


def test_capsules_that_live_at_exit_are_deleted_quietly() -> None:
    code = """
import weakref, numpy, dlpack_loader.dlpack as d
class Array(numpy.ndarray): pass
array = numpy.zeros(3).view(Array)
weakref.finalize(array, print, "freed").atexit = False
kept = d.take(array, stream=None)
del array
print("end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["end", "freed"], "")
