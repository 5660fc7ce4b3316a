"""Copies between a device and its host on a second stream, next to the computing stream.

No memory is freed while a copy reads or writes it. The computing stream waits for the stream of copies before
a copied tensor is freed or used. The stream of copies waits for the computing stream before a copy reads the
latter's results, or writes memory that the latter may still read. All waits are for whole streams.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from spbench.impls.kernels.host_copies import host_empty_like, to_device_, to_host_


class CopyStream:
    """A stream that copies between one device and its host."""

    def __init__(self, device: torch.device):
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        #: tensors that are being copied to the host
        self._leaving: list[Tensor] = []

    def room(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """An empty tensor in the host's memory, for a copy of a tensor of the device."""
        return host_empty_like(torch.empty((), dtype=dtype, device=self.device).expand(*shape))

    def to_host(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Begin to copy x to the host, into ``into`` or a new tensor, and return the copy. Until
        :meth:`wait`, nothing may write to x, and x is not freed."""
        host = host_empty_like(x) if into is None else into
        with self.behind():
            to_host_(host, x)
        self._leaving.append(x)
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """Begin to copy ``host`` to the device; the result holds the values after :meth:`wait`."""
        x = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        with self.behind():
            to_device_(x, host)
        return x

    def changed(self, x: Tensor, host: Tensor) -> None:
        """Begin to copy x, which came from ``host`` and has changed, back into ``host``."""
        self.to_host(x, host)

    def wait(self) -> None:
        """Have the computing stream wait for all copies that have begun."""
        self._module.current_stream().wait_stream(self._stream)
        self._leaving.clear()

    def wait_on_host(self) -> None:
        """Have both the computing stream and the host wait for all copies that have begun."""
        self.wait()
        self._module.synchronize()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """A context whose work goes to this stream, after all work that the computing stream has so far."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield


class NoCopies(CopyStream):
    """A :class:`CopyStream` that copies nothing; tensors stay on the device."""

    def __init__(self, device: torch.device):
        self.device = device

    def room(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def to_host(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        return x if into is None else into.copy_(x)

    def to_device(self, host: Tensor) -> Tensor:
        return host

    def changed(self, x: Tensor, host: Tensor) -> None:
        pass

    def wait(self) -> None:
        pass

    def wait_on_host(self) -> None:
        pass
