"""Lazy tensors (torch), read when they are copied somewhere: weight loaders as they are then read into parameters."""

from dlpack_loader.lazy.parts import LazyReport
from dlpack_loader.lazy.tensor import LazySource, LazyTensor

__all__ = ["LazyReport", "LazySource", "LazyTensor"]
