"""Counts what would cross between host and device, were there one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.overrides import TorchFunctionMode

CROSSINGS = {
    "__bool__", "__float__", "__index__", "__int__", "as_tensor", "cpu", "from_numpy", "item", "nonzero", "numpy",
    "tensor", "tolist",
}  # fmt: skip
"""Names of torch's functions and methods that make the host wait for a device, or that send it something."""


class HostWatcher(TorchFunctionMode):
    """Counts crossings by name while it is the context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in CROSSINGS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
