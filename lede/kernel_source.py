"""What the code of a compiled layer depends on, and what it is given anew at every call.

Code that was compiled for one layer runs every layer that is made alike: of the same classes from the same files, with
the same settings, and weights of the same shapes. Their numbers are arguments of the code, not part of it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lede.ends import Readout
from lede.snapshot import own_forward

PACKED = ("packed", "packed_number")
"""What packing leaves on a linear layer; the number is an argument of compiled code."""
NUMBER = "layer_idx"
"""The place of a layer, which only tells a cache where to write."""

UNUSED = frozenset(
    (
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "num_hidden_layers"),
    )
)
"""Settings of a config that no layer computes with; of dtypes the weights tell."""

_OWN = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, enum.Enum)
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
_FIXED = (*_PLAIN, *_BY_NAME)
"""Settings that can be replaced, but not changed in place."""


class UnknownPartError(ValueError):
    """A layer holds something of which it can't be said what code depends on."""


class Head(nn.Module):
    """A readout as a module, so that it is taken apart like a layer.

    Args:
        readout: From states to logits.
    """

    def __init__(self, readout: Readout) -> None:
        super().__init__()
        for name, value in vars(readout).items():
            setattr(self, name, value)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(1, token, vocabulary)` of states `(1, token, width)`."""
        return Readout.__call__(self, hidden)  # type: ignore[arg-type]  # it has the readout's parts, by their names


class KernelSource:
    """A layer, or a head, as its code sees it.

    Args:
        module: It; not kept, so that it can go.
        configs: Configs in words by their id, shared with other sources for as long as no config changes.

    Attributes:
        text: Everything that the code depends on, but for the kind of machine and the versions of packages.

    Raises:
        UnknownPartError: It has hooks, a replaced forward, or settings whose meaning is not known.
    """

    def __init__(self, module: nn.Module, configs: dict[int, str] | None = None) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._configs = {} if configs is None else configs
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._settings: list[tuple[Mapping[str, Any], str, Any, str | None]] = []
        lines = list(self._describe(module, ""))
        self._looks = [_look(tensor) for tensor in self.tensors()]
        self.text = "\n".join((*lines, *map(repr, self._looks)))

    def tensors(self) -> list[torch.Tensor]:
        """The weights as they are now, in an order that layers made alike share."""
        return [place[name] for place, name in self._slots]

    @property
    def is_plain(self) -> bool:
        """Whether the weights are plain tensors on the CPU, as kernels read them."""
        return all(look[0] and look[-1].type == "cpu" for look in self._looks)

    def place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let a skeleton compute with these tensors."""
        for (place, name), tensor in zip(self._slots, tensors, strict=True):
            place[name] = tensor

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether weights look as those that the source was made of."""
        return [_look(tensor) for tensor in tensors] == self._looks

    def holds(self, configs: dict[int, str] | None = None) -> bool:
        """Whether parts, settings, and which weights there are, are those that the source was made of.

        An adapter is switched off or merged by its settings alone, in place. How weights look is for `fits` to say.

        Args:
            configs: As above.
        """
        self._configs = {} if configs is None else configs
        if any(len(place) != size for place, size in self._sizes):
            return False
        for place, name, value, words in self._settings:
            if place.get(name, self) is not value:
                return False
            try:
                if words is not None and self._say(value, name) != words:
                    return False
            except UnknownPartError:
                return False
        return True

    def _describe(self, module: nn.Module, path: str) -> Iterator[str]:
        if own_forward(module) is not None or "_hf_hook" in vars(module):
            raise UnknownPartError(f"{path or 'the layer'} has a forward of its own")
        if any(getattr(module, hooks) for hooks in vars(module) if hooks.endswith("_hooks")):
            raise UnknownPartError(f"{path or 'the layer'} has hooks")
        yield f"{path}: {_named(type(module))}, {_file_digest(type(module).__module__)}"
        yield from self._class_forward(type(module), path)
        own = vars(module)
        self._sizes += [(place, len(place)) for place in (own, module._parameters, module._buffers, module._modules)]
        for name, value in sorted(own.items()):
            if name not in _OWN and name not in (*PACKED, NUMBER, "forward"):
                said = self._say(value, f"{path}.{name}")
                self._settings.append((own, name, value, None if isinstance(value, _FIXED) else said))
                yield f"{path}.{name} = {said}"
        yield f"{path}.training = {module.training}"
        self._settings.append((own, "training", module.training, None))
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                yield f"{path}.{name} is {'nothing' if tensor is None else 'a tensor'}"
                self._have(place, name)
        if "packed_number" in own:
            self._have(own, "packed_number")
            if own["packed_number"] is not None:
                yield f"{path} is packed"
        for name, part in module._modules.items():
            self._settings.append((module._modules, name, part, None))
            if part is None:
                yield f"{path}.{name} is nothing"
            else:
                yield from self._describe(part, f"{path}.{name}")

    def _class_forward(self, kind: type[nn.Module], path: str) -> Iterator[str]:
        """What a class runs, where it is not what its file says: somebody may have put another function there."""
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward: Any = vars(owner)["forward"]
        self._settings.append((vars(owner), "forward", forward, None))
        own = (owner.__module__, f"{owner.__qualname__}.forward")
        if (getattr(forward, "__module__", None), getattr(forward, "__qualname__", None)) != own:
            yield f"{path}.forward = {self._say(forward, f'{path}.forward')}"

    def _have(self, place: dict[str, Any], name: str) -> None:
        """Note a tensor that code reads, or that there is none."""
        if place[name] is None:
            self._settings.append((place, name, None, None))
        else:
            self._slots.append((place, name))

    def _say(self, value: Any, path: str) -> str:
        """A setting in words; equal words mean equal code."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(self._say(each, path) for each in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._say(each, path)}' for key, each in value.items())}}}"
        if isinstance(value, PretrainedConfig):
            if id(value) not in self._configs:
                attention = ALL_ATTENTION_FUNCTIONS.get(getattr(value, "_attn_implementation", None) or "eager")
                said = f"{_named(type(value))} {_settings(value)} {self._say(attention, 'its attention')}"
                self._configs[id(value)] = said
            return self._configs[id(value)]
        if isinstance(value, functools.partial):
            return f"{self._say(value.func, path)} of {self._say([value.args, value.keywords], path)}"
        if isinstance(value, _BY_NAME) and "<" not in value.__qualname__:
            return f"{_named(value)}, {_file_digest(value.__module__)}"
        raise UnknownPartError(f"{path} is a {type(value).__name__}, of which it is not known what code makes of it")


def _look(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    if tensor is None:  # it was taken away
        return ()
    return (
        type(tensor) in (torch.Tensor, nn.Parameter),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.device,
    )


def _named(value: type | Callable[..., Any]) -> str:
    name = f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, types.BuiltinFunctionType):
        found: Any = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not value:
            raise UnknownPartError(f"{name} is not what its module has under that name")
    return name


def _settings(config: PretrainedConfig) -> str:
    told = {**config.to_dict(), "attention": getattr(config, "_attn_implementation", None)}
    told = {name: value for name, value in told.items() if name not in UNUSED}
    return json.dumps(told, sort_keys=True, default=repr)


@functools.cache
def _file_digest(module: str | None) -> str:
    """Of the file that a class or function comes from; empty where it comes from none."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file and Path(file).is_file() else ""
