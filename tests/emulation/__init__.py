"""Emulated GPUs, for tests on machines without one.

Real ``cuda.bindings.driver``, KvikIO, hip-python and hipfile run over small libraries that ``cc`` builds from ``src``.
``libcuda.so.1``, ``libcufile.so.0``, ``libamdhip64.so`` and ``libhipfile.so`` are tables of entry points over
``libemulation.so``, which has the devices, the memory, the streams, the faults and the counters.

What it proves is what the code that runs over it does: in which order, within which bounds, for how long it holds on to
what, on which device, and what it does when a call fails. It proves nothing about a vendor's driver: not its speed, not
DMA, not what it does with alignment, registration limits or memory that is mapped somehow else, and not its bugs.

How it makes mistakes visible, every time:

- Device memory is mapped ``PROT_NONE`` where its address says: an access by the host is a segmentation fault, and
  ``read(2)`` into it is ``EFAULT``. A copy that runs over an allocation's end, or into one that was freed, fails.
- No address and no handle is ever given out twice.
- ``Mode.DEFERRED`` runs queued work only when someone synchronises on something that depends on it, so a wait that is
  missing leaves old bytes, and a slot that is reused too early copies the new bytes. ``Mode.LATE`` runs it on a
  background thread. A held stream (``Stream.hold``) runs nothing until it is let go.
- Every call is counted, and any call can be made to fail, to be short or to be slow.
- After a fork, every call in the child fails with 3 (not initialized).

Not modelled:

- Kernels, graphs (operations on a capturing stream are counted and dropped), memory pools, IPC, peer mappings, arrays
  and textures, priorities, event timings, callbacks of ``cuStreamAddCallback``.
- A context's own objects: memory, streams and events belong to a device, and go when its last context goes.
- ``cuStreamSynchronize`` of the NULL stream waits for what was queued there (which comes after what the device's
  blocking streams had before), not for what blocking streams got since.
- ``cuMemFree`` does not wait for work that is queued: that work then fails, which a real driver would hide.
- An error that shows late belongs to its stream, not to the whole context.
- The per-thread variants (``_ptsz``) of calls: handle 2 is the thread's own stream, handle 0 is always the NULL stream.
- In ``Mode.LATE`` one thread runs everything, so nothing overlaps.
- HIP's context stack and device attributes; cuFile and hipFile writes and batches.

The driver that a process has can't be changed once it was looked for, so ``Driver.load`` comes first: before the first
call (importing is fine) of ``cuda.bindings``, KvikIO, hip-python or hipfile. It refuses where another libcuda is there.
"""

from tests.emulation.build import build
from tests.emulation.driver import Allocation, Context, Driver, Fault, Live, Mode, Operation, Seen
from tests.emulation.memory import DeviceMemory, Stream
from tests.emulation.tensor import DeviceTensor

__all__ = [
    "Allocation", "Context", "DeviceMemory", "DeviceTensor", "Driver", "Fault", "Live", "Mode", "Operation", "Seen",
    "Stream", "build",
]  # fmt: skip
