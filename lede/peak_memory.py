"""The most memory in use while something runs, weights included.

On CUDA it is what torch's allocator had handed out at most. On the CPU of a Linux machine it is the highest resident
set of the process: the kernel's high-water mark, set back before the run. It counts all that the process holds, and
memory that the C library keeps after use, so differences of a few megabytes between contenders mean nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_HIGH_WATER_MARK = "5"


class PeakMemory:
    """Measures from its last `start`.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = False

    def start(self) -> None:
        """Set the mark back to what is in use now."""
        self._started = True
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            try:
                _CLEAR.write_text(_RESET_HIGH_WATER_MARK)
            except OSError:
                self._started = False  # another system, or a sandbox that forbids it

    def read(self) -> int | None:
        """Bytes at most since `start`; None where nothing tells."""
        if not self._started:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if self._device.type != "cpu":
            return None
        try:
            lines = _STATUS.read_text().splitlines()
        except OSError:
            return None
        kilobytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(kilobytes[0]) * 1024 if kilobytes else None
