"""What people do with the loader and several frameworks, word for word; shared memory is proven by its address.

Recipes with JAX run in a process of their own: JAX starts threads, and other tests fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dlpack_loader import Target, load_file, load_into, safe_open
from tests.strategies import Producer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint with a tensor that is large enough to be mapped, and dtypes that NumPy lacks."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(256, 128, generator=generator)
    tensors = {
        "weight": weight,
        "half": weight.bfloat16(),
        "eighth": weight.to(torch.float8_e4m3fn),
        "steps": torch.arange(16, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


# Each is a program: `path` is a checkpoint.
WITH_JAX = {
    "one load, seen by JAX, NumPy and torch": """
import numpy as np
import torch
from dlpack_loader import load_file

arrays = load_file(path, "jax")
for name in ("weight", "half", "steps"):
    array = arrays[name]
    as_numpy = np.asarray(array)  # read-only, as JAX arrays are; bfloat16 is ml_dtypes'
    as_torch = torch.from_dlpack(array)  # torch would write through it: don't
    address = array.unsafe_buffer_pointer()
    assert as_numpy.ctypes.data == as_torch.data_ptr() == address
    assert not as_numpy.flags.writeable
    assert torch.equal(as_torch, load_file(path)[name])
""",
    "from torch to JAX": """
import jax
import numpy as np
from dlpack_loader import load_file

tensors = load_file(path, "pt", backend="pread")  # memory of torch's, which is aligned as JAX wants it
for name in ("weight", "half", "eighth", "steps"):
    tensor = tensors[name]
    array = jax.dlpack.from_dlpack(tensor, copy=False)  # copy=False: an error where it would be copied
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert np.array_equal(np.asarray(array), np.asarray(load_file(path, "jax")[name]))
""",
    "from NumPy to JAX": """
import jax
import numpy as np
from dlpack_loader import load_file

arrays = load_file(path, "np", backend="pread")
for name, array in arrays.items():
    moved = jax.device_put(array)  # copied or not, as JAX sees fit; the dtypes of ml_dtypes go this way too
    assert moved.dtype == array.dtype and np.array_equal(np.asarray(moved), array)
""",
    "into your own buffers, then into JAX": """
import jax
import numpy as np
from dlpack_loader import load_into

block = np.empty(256 * 128 * 4 + 63, np.uint8)
start = -block.ctypes.data % 64  # XLA's alignment
weight = block[start : start + 256 * 128 * 4].view(np.float32).reshape(256, 128)
load_into(path, {"weight": weight}, strict=False)
array = jax.dlpack.from_dlpack(weight, copy=False)
assert array.unsafe_buffer_pointer() == weight.ctypes.data
weight = block = None  # the array keeps the memory; nobody else may write there now
assert float(array[0, 0]) == float(np.asarray(array)[0, 0])
""",
    "a pytree, spread over devices": """
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dlpack_loader import load_file, unflatten

mesh = Mesh(np.array(jax.devices()), ("x",))
rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
parameters = unflatten(load_file(path, "jax", lambda entry: rows if len(entry.shape) == 2 else whole))
assert [shard.data.shape for shard in parameters["weight"].addressable_shards] == [(64, 128)] * 4
norms = jax.jit(lambda tree: jax.tree.map(lambda leaf: abs(leaf.astype("float32")).max(), tree))(parameters)
assert float(norms["steps"]) == 15
""",
}


@pytest.mark.parametrize("name", WITH_JAX)
def test_with_jax(path: Path, name: str) -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"path = {str(path)!r}\n{WITH_JAX[name]}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_load_seen_by_torch_and_numpy(path: Path) -> None:
    tensor = load_file(path, "pt")["weight"]
    array = tensor.numpy()
    assert array.ctypes.data == tensor.data_ptr()
    array[0, 0] = 7
    assert tensor[0, 0] == 7
    again = torch.from_numpy(load_file(path, "np")["weight"])
    assert torch.equal(again[1:], tensor[1:])
    assert again[0, 0] != 7  # a write never reaches the file


def test_bfloat16_between_numpy_and_torch(path: Path) -> None:
    """Neither knows the other's: the bits go as integers, and no byte is copied."""
    array = load_file(path, "np")["half"]
    assert array.dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    assert tensor.data_ptr() == array.ctypes.data
    assert torch.equal(tensor, load_file(path, "pt")["half"])
    back = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    assert back.ctypes.data == array.ctypes.data


def test_fp8_in_numpy(path: Path) -> None:
    array = load_file(path, "np")["eighth"]
    assert array.dtype == ml_dtypes.float8_e4m3fn
    values = load_file(path, "pt")["eighth"].float().numpy()
    assert np.array_equal(array.astype(np.float32), values)


def test_bfloat16_and_fp8_into_integers_of_ones_own(path: Path) -> None:
    """For libraries without these dtypes: their bits, in memory that is there already."""
    half, eighth = np.zeros((256, 128), np.uint16), np.zeros((256, 128), np.uint8)
    load_into(
        path,
        {"half": Target(half, reinterpret=True), "eighth": Target(eighth, reinterpret=True)},
        strict=False,
    )
    assert np.array_equal(half.view(ml_dtypes.bfloat16), load_file(path, "np")["half"])
    assert np.array_equal(eighth.view(ml_dtypes.float8_e4m3fn), load_file(path, "np")["eighth"])


def test_bfloat16_as_float32_of_ones_own(path: Path) -> None:
    wide = np.zeros((256, 128), np.float32)
    load_into(path, {"half": wide}, strict=False, cast=True)
    assert np.array_equal(wide, load_file(path, "pt")["half"].float().numpy())


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_any_consumer_of_dlpack(path: Path, framework: str) -> None:
    """NumPy's and torch's ``from_dlpack`` stand for any: they see nothing but ``__dlpack__``."""
    made: Any = load_file(path, framework)["weight"]
    address = made.data_ptr() if framework == "pt" else made.ctypes.data
    assert np.from_dlpack(made).ctypes.data == address
    assert torch.utils.dlpack.from_dlpack(made).data_ptr() == address


def test_any_producer_of_dlpack(path: Path) -> None:
    """An object that has ``__dlpack__`` and nothing else is a destination."""
    memory = np.zeros((256, 128), np.float32)
    with safe_open(path, "np") as reader:
        reader.read_into("weight", Producer(memory))
        assert np.array_equal(memory, reader.get_tensor("weight"))
