"""A model filled by its own weight loaders: lazy tensors against the stock loop over safetensors' tensors."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

import dlpack_loader
from tests.benchmarks.compare import drop_cache, interleave, row

WIDTH, KEYS, INNER = 1536, 256, 4096


class Layer(torch.nn.Module):
    """A decoder layer with the fused parameters that inference engines have."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = parameter(WIDTH + 2 * KEYS, WIDTH)
        self.out = parameter(WIDTH, WIDTH)
        self.gate_up = parameter(2 * INNER, WIDTH)
        self.down = parameter(WIDTH, INNER)
        self.norm = parameter(WIDTH)

    PLACES = {  # noqa: RUF012 - the table of the loader, never changed
        "q": ("qkv", 0, WIDTH),
        "k": ("qkv", WIDTH, KEYS),
        "v": ("qkv", WIDTH + KEYS, KEYS),
        "gate": ("gate_up", 0, INNER),
        "up": ("gate_up", INNER, INNER),
    }

    def load(self, name: str, loaded: torch.Tensor) -> None:
        """Copy a tensor of the checkpoint to its place, as engines do."""
        place = self.PLACES.get(name)
        if place is None:
            self.get_parameter(name).data.copy_(loaded)
        else:
            parameter, start, size = place
            self.get_parameter(parameter).data.narrow(0, start, size).copy_(loaded)


def parameter(*shape: int) -> torch.nn.Parameter:
    """Make one whose pages were touched, as when weights are refreshed."""
    return torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16), requires_grad=False)


def checkpoint(layers: int) -> dict[str, torch.Tensor]:
    """Make what such layers are loaded from."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (WIDTH, WIDTH),
        "k": (KEYS, WIDTH),
        "v": (KEYS, WIDTH),
        "out": (WIDTH, WIDTH),
        "gate": (INNER, WIDTH),
        "up": (INNER, WIDTH),
        "down": (WIDTH, INNER),
        "norm": (WIDTH,),
    }
    return {
        f"{layer}.{name}": torch.randn(shape, generator=generator).bfloat16()
        for layer in range(layers)
        for name, shape in shapes.items()
    }


def load(model: Iterable[torch.nn.Module], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Hand every tensor to the loader of its layer."""
    layers = list(model)
    for key, loaded in weights:
        number, name = key.split(".")
        layers[int(number)].load(name, loaded)  # type: ignore[operator]


def stock(path: Path, model: Iterable[torch.nn.Module]) -> None:
    """Load as engines do with safetensors."""
    with safetensors.safe_open(path, "pt") as file:
        load(model, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118


def lazy(path: Path, model: Iterable[torch.nn.Module]) -> None:
    """Load with lazy tensors, each read when it is copied."""
    with dlpack_loader.safe_open(path) as reader:
        load(model, reader.iter_lazy())


def deferring(path: Path, model: Iterable[torch.nn.Module]) -> None:
    """Load with lazy tensors, all read together."""
    with dlpack_loader.safe_open(path) as reader, reader.deferring():
        load(model, reader.iter_lazy())


def compare_lazy(folder: Path, rounds: int, nbytes: int) -> None:
    """Fill the parameters of a model, warm and cold."""
    path = folder / "lazy.safetensors"
    one = sum(value.nbytes for value in checkpoint(1).values())
    layers = max(1, nbytes // one)
    save_file(checkpoint(layers), path)
    model = torch.nn.ModuleList(Layer() for _ in range(layers))
    runs = {
        "stock": lambda: stock(path, model),
        "lazy": lambda: lazy(path, model),
        "deferring": lambda: deferring(path, model),
    }
    wanted: list[torch.Tensor] = []
    for name, run in runs.items():
        run()
        got = [value.detach() for value in model.parameters()]
        wanted = wanted or [value.clone() for value in got]
        assert all(map(torch.equal, got, wanted)), name
        for value in model.parameters():
            value.data.fill_(1)
    del wanted, got
    warm = interleave(runs, rounds)
    cold = interleave(runs, rounds, before=lambda: drop_cache(path))
    for name in ("lazy", "deferring"):
        row(f"weight loaders, {name}, warm: throughput / stock", warm["stock"][0] / warm[name][0], ">= 1.00")
        row(f"weight loaders, {name}, cold: throughput / stock", cold["stock"][0] / cold[name][0], ">= 1.40")
        row(f"weight loaders, {name}, cold: CPU seconds / stock", cold[name][1] / cold["stock"][1], "<= 0.50")
    for name, label in itertools.product(("lazy", "deferring"), ("warm", "cold")):
        if label == "cold":
            drop_cache(path)
        command = [sys.executable, "-m", "tests.benchmarks.lazy", str(path), str(layers), name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        beyond = json.loads(done.stdout) / ((64 + 64) << 20)
        row(f"weight loaders, {name}, {label}: peak RSS / (staging + 64 MiB)", beyond, "<= 1.00")
    path.unlink()


def status(key: str) -> int:
    """Return a number of bytes that the kernel knows of this process."""
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024


def measure_peak(path: Path, layers: int, name: str) -> None:
    """Print the bytes by which loading raises the peak of this process."""
    model = torch.nn.ModuleList(Layer() for _ in range(layers))
    with dlpack_loader.safe_open(path) as reader:
        reader.lazy("0.norm").to("cpu")  # what is imported on first use is not a matter of size
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS:")
    {"lazy": lazy, "deferring": deferring}[name](path, model)
    print(status("VmHWM:") - before)


if __name__ == "__main__":
    measure_peak(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
