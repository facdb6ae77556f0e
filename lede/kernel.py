"""A kernel that was compiled ahead of time, in memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lede.closeness import TOLERANCE
from lede.kernel_store import KernelNote, note_of, package_of


@dataclass
class Kernel:
    """A kernel in memory."""

    key: str
    """Its name."""
    note: KernelNote
    """What is known of it."""
    runner: Any
    """torch's; None where the kernel was found to be wrong."""
    is_tried: bool
    """Whether it was held against eager layers."""

    def __call__(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """What it computes of its inputs; the list is emptied."""
        out: torch.Tensor = self.runner.boxed_run(inputs)[0]
        return out

    def try_out(self, apart: Callable[[], float], dtype: torch.dtype) -> None:
        """Use it from now on if it does what eager layers do; else let it go, and say so.

        Args:
            apart: Runs it, and tells how far from eager layers it is.
            dtype: Of the model.
        """
        self.is_tried = True
        try:
            far = apart()
            said = f"what it says differs by {far:.1e} of the largest" if far > TOLERANCE.get(dtype, 0.0) else ""
        except RuntimeError as error:
            said = (str(error).strip().splitlines() or [""])[0]
        if said:
            self.runner = None
            warnings.warn(
                f"a kernel that was compiled ahead is not used ({self.note.about}): {said}; delete "
                f"{package_of(self.key).parent} and run `lede compile` again",
                stacklevel=2,
            )


def can_load() -> bool:
    """Whether torch can load kernels here."""
    return _loader() is not None


def load_kernel(key: str, is_tried: bool) -> Kernel | None:
    """The kernel of that name; None where there is none, or it is damaged."""
    note = note_of(key)
    if note is None:
        return None
    try:
        return Kernel(key, note, _loader()(str(package_of(key)), "model", False, 1, -1), is_tried)
    except (RuntimeError, OSError):
        return None


@functools.cache
def _loader() -> Any:
    """The loader of packages in torch, which is private; None where it is gone."""
    return getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)
