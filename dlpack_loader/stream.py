"""Streams: which is whose, and the order between them.

A load has one stream of its own for each device that it writes to (*owned*: made and destroyed here). Streams of the
caller's are *borrowed*: events are recorded on them and they are made to wait for events, but they are never destroyed
and never synchronised. The order that follows:

- a producer that exports its memory is given our stream, and makes it wait for its pending work (the DLPack protocol);
  where torch has to be asked instead, our stream waits for torch's current one; a stream that the caller names is
  waited for too;
- our copies are on our stream;
- a host-synchronous load waits on the host for our stream's last event, after which any reader sees the data;
  otherwise ``Pending.wait_on(stream)`` makes a stream of the caller's wait for it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Self, cast

from dlpack_loader.errors import DeviceError, OptionError
from dlpack_loader.runtime.device import OF_TORCH, ROCM, Device, StorageDevice, open_device

__all__ = ["OwnedStream", "Streams", "handle_of"]

_LEGACY, _PER_THREAD = 1, 2


def handle_of(stream: Any, device_type: int) -> int:
    """Return the handle of a caller's stream.

    Parameters
    ----------
    stream
        An integer handle, an object with ``__cuda_stream__``, a ``torch.cuda.Stream`` or a ``cupy.cuda.Stream``.
    device_type
        DLPack's. On CUDA, 1 and 2 are the legacy and the per-thread default stream, and 0 is refused as the protocol
        refuses it; on ROCm, 0 is the default stream and 1 and 2 mean nothing.

    Raises
    ------
    OptionError
        It is none of these.
    """
    named = not isinstance(stream, int)
    if hasattr(stream, "__cuda_stream__"):
        version, handle = stream.__cuda_stream__()
        if version != 0:
            raise OptionError(f"version {version} of __cuda_stream__ is not understood")
    else:
        handle = stream if not named else getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise OptionError(
            f"not a stream: {stream!r}", hint="Pass an integer handle or a stream object of torch, CuPy or cuda.core"
        )
    if device_type == ROCM:
        if handle in (_LEGACY, _PER_THREAD):
            raise OptionError(f"stream {handle} has no meaning on ROCm", hint="Pass 0 for the default stream")
    elif handle == 0:
        if not named:
            raise OptionError(
                "stream 0 is ambiguous on CUDA", hint="Pass 1 for the legacy default stream, 2 for the per-thread one"
            )
        handle = _LEGACY  # what a framework's object for the default stream has inside
    return handle


class OwnedStream:
    """The stream of one load on one device, with an event that marks its last work."""

    def __init__(self, device: Device) -> None:
        self.device = device
        try:
            with device.current():
                self.handle = device.create_stream()
                try:
                    self.event = device.create_event()
                except BaseException:
                    device.destroy_stream(self.handle)
                    raise
        except BaseException:
            device.close()
            raise
        self._open = True

    def follow(self, stream: int) -> None:
        """Wait, on the device, for what is on a borrowed stream now; refuse one that captures a graph."""
        device = self.device
        with device.current():
            if device.is_capturing(stream):
                raise DeviceError(
                    "the stream is capturing a graph, which a load from storage can't be part of",
                    hint="Load before the capture begins or after it ends",
                )
            event = device.create_event()
            try:
                device.record(event, stream)
                device.wait(self.handle, event)
            finally:
                device.destroy_event(event)  # released by the driver once it has happened

    def mark(self) -> None:
        """Record the event after everything enqueued so far."""
        with self.device.current():
            self.device.record(self.event, self.handle)

    def lead(self, stream: int) -> None:
        """Make later work on a borrowed stream wait, on the device, for the mark."""
        with self.device.current():
            self.device.wait(stream, self.event)

    def synchronize(self) -> None:
        """Wait on the host for everything on the stream."""
        with self.device.current():
            self.device.synchronize_stream(self.handle)

    def close(self) -> None:
        """Destroy stream and event and give back the context; doing it twice is fine."""
        if not self._open:
            return
        self._open = False
        with self.device.current():
            self.device.destroy_event(self.event)
            self.device.destroy_stream(self.handle)
        self.device.close()


class Streams:
    """The owned streams of one load, made when a destination on their device turns up."""

    def __init__(self, borrowed: Any = None) -> None:
        self._borrowed = borrowed
        self._owned: dict[tuple[int, int], OwnedStream] = {}
        self._published = threading.Event()
        self._lock = threading.Lock()
        self._handed_over = False

    def of(self, device: tuple[int, int]) -> OwnedStream:
        """Return the stream of a DLPack device; a stream that the caller named is followed first."""
        owned = self._owned.get(device)
        if owned is None:
            handle = None
            if self._borrowed is not None and device[0] not in OF_TORCH:
                handle = handle_of(self._borrowed, device[0])
            owned = OwnedStream(open_device(device))
            if self._borrowed is not None:
                try:
                    owned.follow(_number_of(self._borrowed, owned) if handle is None else handle)
                except BaseException:
                    owned.close()
                    raise
            self._owned[device] = owned
        return owned

    def adopt(self, device: tuple[int, int], storage: object) -> None:
        """Take in the storage of a destination on a device of ``OF_TORCH``, which no export makes us wait for."""
        owned = self.of(device)
        with owned.device.current():
            cast("StorageDevice", owned.device).adopt(storage, owned.handle)

    def check(self) -> None:
        """Refuse a borrowed stream that no destination has a use for."""
        if self._borrowed is not None and not self._owned:
            raise OptionError("host memory has no stream", hint="Pass stream=None")

    def detach(self) -> Streams:
        """Hand over to somebody who closes them: leaving the ``with`` then does not."""
        self._handed_over = True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._handed_over:
            self.close()

    def publish(self) -> None:
        """Say that everything is enqueued: from now on another stream can be made to wait for it."""
        for owned in self._owned.values():
            owned.mark()
        self._published.set()

    def lead(self, stream: Any) -> None:
        """Make a borrowed stream wait, on its device, for everything of this load; wait on the host until it can."""
        self._published.wait()
        with self._lock:  # not while they are being destroyed
            for device, owned in self._owned.items():
                owned.lead(_number_of(stream, owned) if device[0] in OF_TORCH else handle_of(stream, device[0]))

    def close(self) -> None:
        """Wait on the host for all of them and destroy them; doing it twice is fine."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._published.set)
            closing.callback(self._destroy)
            for owned in self._owned.values():
                closing.callback(owned.synchronize)  # each, though another may fail

    def _destroy(self) -> None:
        with self._lock, contextlib.ExitStack() as closing:
            owned, self._owned = self._owned, {}
            for stream in owned.values():
                closing.callback(stream.close)


def _number_of(stream: Any, owned: OwnedStream) -> int:
    return cast("StorageDevice", owned.device).number_of(stream)
