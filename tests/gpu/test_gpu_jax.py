"""JAX arrays on a real GPU, over memory that CuPy or torch lends; and one load that all of them see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_loader import load_file, safe_open
from dlpack_loader.dtype import BY_CODE
from tests.gpu.material import bits_of
from tests.strategies import unpack

pytestmark = pytest.mark.gpu
Checkpoint = tuple[Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def gpus() -> Iterator[list[Any]]:
    """JAX's GPUs; JAX is kept from taking most of their memory for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        jax = pytest.importorskip("jax")
        try:
            devices = jax.local_devices(backend="gpu")
        except RuntimeError as error:
            pytest.skip(f"JAX finds no GPU: {error}")
        yield devices


def test_every_dtype(checkpoint: Checkpoint, gpus: list[Any]) -> None:
    import jax

    path, contents = checkpoint
    with jax.enable_x64(True), safe_open(path, "jax", gpus[0]) as reader:
        for name, raw in contents.items():
            array = reader.get_tensor(name)
            four = BY_CODE[reader.entry(name).dtype].code == "F4"
            assert array.devices() == {gpus[0]}
            assert np.asarray(array).tobytes() == (unpack(raw, 4).astype(np.uint8).tobytes() if four else raw), name


def test_spellings(checkpoint: Checkpoint, gpus: list[Any]) -> None:
    for device in ("cuda", "cuda:0", "gpu:0", torch.device("cuda:0"), gpus[0]):
        with safe_open(checkpoint[0], "jax", device) as reader:
            assert reader.get_tensor("F32.large").devices() == {gpus[0]}


def test_rows_and_replicas_on_all_gpus(checkpoint: Checkpoint, gpus: list[Any]) -> None:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(gpus), ("x",))
    whole = load_file(checkpoint[0], "np")["F32.large"]
    for spec in (PartitionSpec(), PartitionSpec(None, "x")):
        with safe_open(checkpoint[0], "jax", NamedSharding(mesh, spec)) as reader:
            array = reader.get_tensor("F32.large")
        assert array.sharding.spec == spec
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()


def test_one_load_seen_by_torch_and_jax(checkpoint: Checkpoint, device: torch.device, gpus: list[Any]) -> None:
    import jax

    tensor = load_file(checkpoint[0], "pt", device)["F32.large"]
    array = jax.dlpack.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert np.asarray(array).tobytes() == bits_of(tensor)
    assert torch.utils.dlpack.from_dlpack(array).data_ptr() == tensor.data_ptr()


def test_one_load_seen_by_cupy_torch_and_jax(checkpoint: Checkpoint, device: torch.device, gpus: list[Any]) -> None:
    import jax

    pytest.importorskip("cupy")
    with safe_open(checkpoint[0], "cupy", device) as reader:
        lent = reader.get_tensor("F32.large")
    tensor, array = torch.utils.dlpack.from_dlpack(lent), jax.dlpack.from_dlpack(lent)
    assert lent.data.ptr == tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert np.asarray(array).tobytes() == bits_of(tensor)
