"""A pretended CUDA device: tensors of the CPU that say they are on `cuda:0`, and that are watched as if they were.

While `pretended_cuda()` (tests/pretend_cuda.py) is the context, factories, `.to`, `.cuda` and `Module.to` accept `cuda`
and mark what they make; what is computed from marked tensors is marked. All is computed by the CPU's kernels, so a text
is that of the CPU to the last bit. As on a GPU, tensors of two devices in one operation raise, and so does numpy on a
marked one, and a mask that attention can't load; what a copy that nobody waits for writes is garbage until somebody
does. Waits of the host and copies to the device are counted with the line of lede that caused them. What it can't tell:
anything of kernels, streams, graphs and memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as defaults

ROOT = Path(__file__).parents[1]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
REAL_GENERATOR = torch.Generator

WAITS = {
    *("__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__"),
    *("allclose", "argwhere", "bincount", "equal", "is_nonzero", "item", "masked_select", "multinomial", "nonzero"),
    *("tolist", "unique", "unique_consecutive"),
}
"""What makes the host wait for a device: it needs a value, or a size that depends on values."""
NO_NUMBERS = {
    *("addmm", "bmm", "cat", "concat", "embedding", "gather", "index_copy_", "index_select", "linear", "matmul", "mm"),
    *("scatter", "scatter_", "stack", "take_along_dim"),
}
"""What takes no 0-dimensional tensor of the CPU among those of a device."""
ANYWHERE = {"_has_compatible_shallow_copy_type", "is_same_size"}
"""What asks about two tensors and computes nothing."""


def on_device(tensor: Any) -> bool:
    """Whether a tensor says that it is on the device."""
    return bool(getattr(tensor, "_pretended", False))


def marked(found: Any, there: bool = True) -> Any:
    """A result, its tensors being on the device from now on, or no longer."""
    for tensor in tensors_in(found):
        vars(tensor)["_pretended"] = there
    return found


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Tensors of arguments, however nested."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list, set)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def names_device(value: Any) -> bool:
    """Whether an argument names the device."""
    return isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"


def _line() -> str:
    """The innermost line of lede on the stack, or else of a test."""
    frame: FrameType | None = sys._getframe(2)
    test = "elsewhere"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents and path != Path(__file__):
            place = path.relative_to(ROOT)
            if place.parts[0] != "tests":
                return f"{place}:{frame.f_lineno}"
            test = f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return test


class PretendedDevice(TorchFunctionMode):
    """Plays the device while it is the context.

    Attributes:
        waits: Waits of the host, by function and line of lede.
        sent: Copies to the device that the host waits for, likewise; a GPU's host waits for all before them too.
        sent_along: Copies to the device that nobody waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()
        self._coming: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forget(self) -> None:
        """Count anew."""
        self.waits: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()
        self.sent_along: Counter[tuple[str, str]] = Counter()

    @staticmethod
    @contextmanager
    def off() -> Iterator[None]:
        """Nothing is pretended inside the context."""
        with torch._C.DisableTorchFunction():
            yield

    def synchronize(self, *_: Any, **__: Any) -> None:
        """The host waits for the device."""
        with self.off():
            self._wait("synchronize")

    def _wait(self, name: str) -> None:
        """Count a wait, after which is there what copies wrote."""
        self.waits[name, _line()] += 1
        for host, value in self._coming:
            host.copy_(value)
        self._coming.clear()

    def _send(self, name: str, along: bool, source: Any) -> None:
        unwaited = along and getattr(source, "_pinned", False)
        (self.sent_along if unwaited else self.sent)[name, _line()] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args)
        if name == "__set__":
            return marked(args[0], on_device(args[1])) if func(*args) is None else None
        if name == "_parse_to":  # of `Module.to`
            there = any(map(names_device, (*args, *kwargs.values())))
            found = func(*_at_home(args), **{key: _at_home([value])[0] for key, value in kwargs.items()})
            return (GPU, *found[1:]) if there else found
        if name == "pin_memory" or kwargs.pop("pin_memory", False):
            found = args[0].clone() if name == "pin_memory" else func(*args, **kwargs)
            vars(found)["_pinned"] = True
            return found
        if name in ("cpu", "cuda"):
            return self._moved(torch.Tensor.to, (args[0], GPU if name == "cuda" else CPU), {})
        if name in ("to", "type_as"):
            return self._moved(func, args, kwargs)
        if name == "copy_":
            return self._copied(*args, **kwargs)
        return self._computed(name, func, args, kwargs)

    def _computed(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What any other function makes, which is where its arguments are, or where it is asked for."""
        given = list(tensors_in((args, kwargs)))
        here = any(map(on_device, given))
        if here:
            if name in ("numpy", "__array__", "__dlpack__"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            if name in ("__getitem__", "__setitem__", "index_put_"):
                self._indexed(name, *args)
            elif name not in ANYWHERE:
                _meet(name, given)
            if name == "scaled_dot_product_attention":
                _attended(*args, **kwargs)
            sized = name == "repeat_interleave" and len(given) > 1 and kwargs.get("output_size") is None
            if name in WAITS or sized or (name == "where" and len(args) == 1):
                self._wait(name)
        device, generator = kwargs.get("device"), kwargs.get("generator")
        if device is None and defaults.CURRENT_DEVICE is not None and func in defaults._device_constructors():
            device = defaults.CURRENT_DEVICE  # of `with torch.device(...)`
        there = names_device(device) or any(isinstance(a, torch.device) and names_device(a) for a in args)
        there = there or (device is None and here)
        if isinstance(generator, REAL_GENERATOR) and names_device(generator.device) != there:
            raise RuntimeError(f"Expected a '{'cuda' if there else 'cpu'}' device type for generator")
        if name in ("tensor", "as_tensor") and there and not here:
            self._send(name, False, None)
        if device is not None:
            kwargs["device"] = CPU
        found = func(*_at_home(args), **kwargs)
        return marked(found) if there and not (args and found is args[0]) else found

    def _attribute(self, func: Any, args: Any) -> Any:
        """A property of a tensor."""
        if not on_device(args[0]):
            return func(*args)
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        own = {"device": GPU, "is_cuda": True, "is_cpu": False}
        return own[name] if name in own else marked(func(*args))

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`tensor.to(...)`."""
        tensor, rest = args[0], [*args[1:], *kwargs.values()]
        likes = [arg for arg in rest if isinstance(arg, torch.Tensor)]
        devices = [arg for arg in rest if isinstance(arg, (str, torch.device))]
        before = on_device(tensor)
        after = names_device(devices[0]) if devices else on_device(likes[0]) if likes else before
        found = func(*_at_home(args), **{key: _at_home([value])[0] for key, value in kwargs.items()})
        if before == after:
            return marked(found) if after and found is not tensor else found
        along = bool(kwargs.get("non_blocking")) or True in args[1:]
        if after:
            self._send("to", along, tensor)
        else:
            assert not along, "a copy to the host that nobody waits for: the host would read garbage"
            self._wait("to")
        return marked(found.clone(), after)

    def _copied(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """`target.copy_(source)`."""
        if on_device(target) and not on_device(source):
            self._send("copy_", non_blocking, source)
        elif on_device(source) and not on_device(target):
            if non_blocking and getattr(target, "_pinned", False):
                self._coming.append((target, source.clone()))
                target.view(torch.uint8).fill_(0xA5)
                return target
            self._wait("copy_")
        return target.copy_(source)

    def _indexed(self, name: str, target: Any, index: Any, value: Any = None, *_: Any) -> None:
        """An index of the CPU is sent to a device and waited for; masks and single places are waited for, too."""
        inside, written = list(tensors_in(index)), list(tensors_in(value))
        for tensor in inside:
            place = not tensor.dim() and tensor.dtype != torch.bool
            if on_device(tensor) and not on_device(target) and not place:
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            mask = tensor.dtype == torch.bool and (name == "__getitem__" or bool(written))
            if (on_device(tensor) and place) or (on_device(target) and mask):
                self._wait(name)
            elif on_device(target) and not on_device(tensor) and not place:
                self._send(name, False, tensor)
        if on_device(target) and any(
            isinstance(each, list) for each in (index if isinstance(index, tuple) else [index])
        ):
            self._send(name, False, None)
        for tensor in written:
            if on_device(tensor) != on_device(target) and tensor.dim():
                if inside:
                    raise RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu")
                self._send(name, False, tensor) if on_device(target) else self._wait(name)


def _at_home(args: Any) -> list[Any]:
    """Arguments with the CPU in the device's place."""
    return [
        CPU if isinstance(arg, torch.device) or (isinstance(arg, str) and names_device(arg)) else arg for arg in args
    ]


def _meet(name: str, given: list[torch.Tensor]) -> None:
    """Raise where tensors of two devices meet."""
    if any(not on_device(tensor) and (tensor.dim() or name in NO_NUMBERS) for tensor in given):
        raise RuntimeError(f"Expected all tensors to be on the same device, got cuda:0 and cpu: {name} at {_line()}")


def _attended(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> None:
    """Raise where the kernels of a GPU can't load a mask; those for float64 can load any."""
    if attn_mask is not None and query.dtype != torch.float64 and attn_mask.storage_offset() * attn_mask.itemsize % 16:
        raise RuntimeError("p.attn_bias_ptr is not correctly aligned")
