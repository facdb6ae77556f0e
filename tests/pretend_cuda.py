"""What `torch.cuda` says while a device is pretended (tests/pretend_device.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.pretend_device import GPU, REAL_GENERATOR, PretendedDevice, marked, names_device, on_device

_REAL_PARAMETER = torch.nn.Parameter.__new__


class _Generator(torch.Generator):
    """A generator that says it is on the device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


class _AnyGenerator(torch.Generator):
    """What `torch.Generator` is in the meantime: on the device where one is asked for there."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        return _Generator() if names_device(device) else REAL_GENERATOR(device)


def _parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    made = _REAL_PARAMETER(cls, data, requires_grad)
    return marked(made) if on_device(data) else made


@contextmanager
def pretended_cuda() -> Iterator[PretendedDevice]:
    """One pretended CUDA device; what is made on it is of no use afterwards."""
    device = PretendedDevice()
    stream = SimpleNamespace(synchronize=device.synchronize)
    said: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "get_device_name": lambda *_: "Pretended GPU",
        "synchronize": device.synchronize,
        "current_stream": lambda *_: stream,
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 1 << 20,
        "mem_get_info": lambda *_: (1 << 40, 1 << 40),
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "set_sync_debug_mode": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_: True,
    }
    with ExitStack() as stack:
        for name, answer in said.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.nn.Parameter, "__new__", _parameter))
        stack.enter_context(mock.patch.object(torch, "Generator", _AnyGenerator))
        stack.enter_context(device)
        yield device
