"""Weights from safetensors files into memory that the caller has, on any device.

The header says what the bytes are, DLPack says where they go, a stream says when.

The files, in the order in which they use one another (a later one uses earlier ones only)::

    errors  dtype  header  checkpoint       what the file says
    selection  bounds  reads  plan          what is to be read (pure data)
    dlpack  runtime/  destination           where it goes
    backend/  transfer                      how it gets there
    framework/  matching  making            whose memory it is
    reader  load                            the public calls
    cli                                     people at a terminal
"""

from dlpack_loader.backend import BackendInfo
from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Target
from dlpack_loader.errors import LoaderError
from dlpack_loader.header import Entry
from dlpack_loader.load import load_file, load_into, load_model
from dlpack_loader.plan import Plan
from dlpack_loader.reader import Reader, Slice, safe_open
from dlpack_loader.transfer import LoadReport, Pending

__all__ = [
    "BackendInfo",
    "Bounds",
    "Entry",
    "LoadReport",
    "LoaderError",
    "Pending",
    "Plan",
    "Reader",
    "Slice",
    "Target",
    "__version__",
    "load_file",
    "load_into",
    "load_model",
    "safe_open",
]

__version__ = "0.1.0"
