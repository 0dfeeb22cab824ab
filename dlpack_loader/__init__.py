"""Weights from safetensors files into memory that the caller has, on any device.

The header says what the bytes are, DLPack says where they go, a stream says when.

The files, in the order in which they use one another (a later one uses earlier ones only)::

    errors  dtype  header  checkpoint       what the file says
    quantities  html                        words for counts, what notebooks show (strings)
    selection  bounds  reads  plan          what is to be read (pure data)
    dlpack  runtime/  destination  region   where it goes
    backend/  transfer                      how it gets there
    framework/  matching  making            whose memory it is
    lazy  slices                            read when they are used
    reader  load  sharded  refresh  tree    the public calls
    bench  diff  doctor                     measuring, comparing, examining
    cli  integrations/                      people at a terminal; other programs
"""

from dlpack_loader.backend import BackendInfo
from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Target
from dlpack_loader.errors import LoaderError
from dlpack_loader.header import Entry
from dlpack_loader.load import load_file, load_into, load_model
from dlpack_loader.plan import Plan
from dlpack_loader.reader import Reader, safe_open
from dlpack_loader.refresh import Refresher
from dlpack_loader.sharded import load_sharded_state
from dlpack_loader.slices import Slice
from dlpack_loader.transfer import LoadReport, Pending
from dlpack_loader.tree import flatten, unflatten

__all__ = [
    "BackendInfo",
    "Bounds",
    "Entry",
    "LoadReport",
    "LoaderError",
    "Pending",
    "Plan",
    "Reader",
    "Refresher",
    "Slice",
    "Target",
    "__version__",
    "flatten",
    "load_file",
    "load_into",
    "load_model",
    "load_sharded_state",
    "safe_open",
    "unflatten",
]

__version__ = "0.1.0"
