"""Measure a tensor when it is shown, for a run that keeps statistics and no tensors: nothing is copied.

A CPU tensor is measured by the thread that shows it, in one read. CUDA tensors are measured by one kernel each, into
one device buffer; it goes to the host in one transfer when the iteration ends (or when it is full), and the writers
read what was measured out of that. No thread waits for the device but a writer, for an event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.quantscope.capture.rows import Measured, measured
from megatron.quantscope.capture.snapshot import check_dense

if TYPE_CHECKING:
    import torch

    from megatron.quantscope.formats.triton_statistics import DeviceStatistics, Ticket, Transfer

DEVICE_BUFFER_BYTES = 64 << 20  # statistics of some thousand tensors, and the block exponents of 2 G elements


class Measurement:
    """What was measured of one tensor; call it for the result, once it is ready."""

    def __init__(self, found: Measured) -> None:
        self._found = found

    @property
    def ready(self) -> bool:
        """Whether the result may be asked for."""
        return True

    def __call__(self) -> Measured:
        """Statistics and block exponents."""
        return self._found


class _Filling:
    """One filling of a device buffer, and its way to the host when that has begun."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None


class _DeviceMeasurement(Measurement):
    def __init__(self, ticket: Ticket, filling: _Filling) -> None:
        self._ticket = ticket
        self._filling = filling

    @property
    def ready(self) -> bool:
        return self._filling.transfer is not None

    def __call__(self) -> Measured:
        assert self._filling.transfer is not None
        self._filling.transfer.wait()
        return self._ticket.read(self._filling.transfer)


def measures_on_device(tensor: torch.Tensor) -> bool:
    """Whether there is a kernel that measures this tensor where it is."""
    if not tensor.is_cuda:
        return False
    from megatron.quantscope.formats.backends import BACKENDS

    if BACKENDS["triton"].lacks() is not None:
        return False
    from megatron.quantscope.formats.triton_statistics import DTYPES

    return tensor.dtype in DTYPES


class StatisticsIntake:
    """Measures tensors of any device; belongs to the training thread.

    Args:
        limit_bytes: Bound of a device buffer.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._capacity = min(DEVICE_BUFFER_BYTES, limit_bytes)
        self._devices: dict[torch.device, tuple[DeviceStatistics, _Filling]] = {}

    def measure(self, tensor: torch.Tensor) -> Measurement:
        """Measure `tensor` now.

        Raises:
            CaptureError: for a tensor that is not dense.
        """
        check_dense(tensor)
        source = tensor.detach()
        on_device = self._measure_on_device(source) if measures_on_device(source) else None
        return on_device or Measurement(measured(source, blocks=True))

    def transfer(self) -> None:
        """Send what the devices have measured to the host."""
        for device in list(self._devices):
            self._transfer(device)

    def _measure_on_device(self, tensor: torch.Tensor) -> Measurement | None:
        """None: it is larger than a whole buffer has room for."""
        from megatron.quantscope.formats.triton_statistics import DeviceStatistics

        device = tensor.device
        if device not in self._devices:
            self._devices[device] = DeviceStatistics(device, self._capacity), _Filling()
        for _ in range(2):  # a buffer that is full, and the empty one after it
            statistics, filling = self._devices[device]
            ticket = statistics.add(tensor, blocks=True)
            if ticket is not None:
                return _DeviceMeasurement(ticket, filling)
            self._transfer(device)
        return None

    def _transfer(self, device: torch.device) -> None:
        statistics, filling = self._devices[device]
        filling.transfer = statistics.transfer()
        self._devices[device] = statistics, _Filling()
