"""Layers run in part: without their attention or their MLP, or watched while they run.

The live model is never touched. A partial layer is a shallow copy of the transformers layer, with the same weights and
a module table of its own, in which one sublayer gives way to zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lede.families import Family, UnsupportedModelError

if TYPE_CHECKING:
    from lede.policies.base import SkipSublayers

ATTENTION, MLP = 0, 1
"""The two sublayers of a layer."""
PLANS_KEPT = 4
"""Plans whose layers are kept for the next round."""

Record = Callable[[int, int, torch.Tensor], None]
"""Takes the place of a layer in the stack (from 0), ATTENTION or MLP, and what that adds, `(row, token, width)`."""

Steps = tuple[tuple[int, nn.Module], ...]
"""Layers to run, each with its place in the stack (from 0)."""


class _NoAttention(nn.Module):
    """Attention that adds nothing and stores no keys or values."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Zeros, and no weights."""
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    """An MLP that adds nothing.

    Args:
        pair: Whether it returns a second value.
    """

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self._pair = pair

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Zeros, and nothing else where there is something else."""
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self._pair else zeros


class _Watched(nn.Module):
    """A module whose output is shown to somebody."""

    def __init__(self, module: nn.Module, show: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.module = module
        self._show = show

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        out = self.module(*args, **kwargs)
        self._show(out[0] if isinstance(out, tuple) else out)
        return out


class Sublayers:
    """Partial layers of one model.

    Args:
        family: What their parts are called.
        layers: The model's own layers.
    """

    def __init__(self, family: Family, layers: Sequence[nn.Module]) -> None:
        self._family = family
        self._parts = [sublayer for sublayer in (family.attention, family.mlp) if sublayer is not None]
        self._layers = layers
        self._recent: dict[SkipSublayers, Steps] = {}  # policies keep to a plan, or take turns among few
        self._checked = False

    def check(self) -> None:
        """Raise UnsupportedModelError when the layers can't be run in part; once they can, they are taken to stay so.

        A layer's own `forward` that is merely the one of its class is fine: transformers leaves that behind on layers
        whose outputs it has collected (`output_hidden_states`).
        """
        if self._checked:
            return
        if len(self._parts) < 2:
            raise UnsupportedModelError(
                f"sublayers can't be left out of a {type(self._layers[0]).__name__}: its attention or its MLP is no "
                "module that can go without the rest; use a policy whose drafts leave at an exit layer"
            )
        for layer in self._layers:
            kind, own = type(layer).__name__, vars(layer)
            # a forward of the object's own is bound to the object it was made for: a copy would run the original
            if "_hf_hook" in own:
                raise UnsupportedModelError(
                    f"sublayers can't be left out of a {kind} with accelerate hooks (device_map over several devices, "
                    "or offloading); load the model onto one device"
                )
            if "forward" in own and getattr(own["forward"], "__func__", None) is not type(layer).forward:
                raise UnsupportedModelError(f"sublayers can't be left out of a {kind} whose forward was replaced")
            missing = [name for names in self._parts for name in names if name and name not in layer._modules]
            if missing:
                raise UnsupportedModelError(f"sublayers can't be left out of a {kind} without {', '.join(missing)}")
        self._checked = True

    def skipping(self, plan: SkipSublayers) -> Steps:
        """The layers from the plan's first gap to the last, without what it leaves out.

        Raises:
            ValueError: The plan doesn't fit the model.
            UnsupportedModelError: The layers can't be run in part.
        """
        known = self._recent.get(plan)
        if known is not None:
            return known
        plan.check(len(self._layers))
        self.check()
        steps = []
        for i in range(plan.prefix, len(self._layers)):
            attention, mlp = i + 1 in plan.attention, i + 1 in plan.mlp
            if not (attention and mlp):
                steps.append((i, self._without(i, ATTENTION if attention else MLP if mlp else None)))
        if len(self._recent) == PLANS_KEPT:
            del self._recent[next(iter(self._recent))]  # the oldest
        self._recent[plan] = tuple(steps)
        return self._recent[plan]

    def recording(self, record: Record) -> Steps:
        """All layers, each showing `record` what its sublayers add.

        Raises:
            UnsupportedModelError: The layers can't be run in part.
        """
        self.check()
        return tuple((i, self._watched(i, record)) for i in range(len(self._layers)))

    def _without(self, i: int, sublayer: int | None) -> nn.Module:
        """Layer i, without one of its sublayers."""
        layer = self._layers[i]
        if sublayer is None:
            return layer
        norm, name, norm_after = self._parts[sublayer]
        nothing = _NoAttention() if sublayer == ATTENTION else _NoMLP(self._family.mlp_pair)
        return _copy(layer, {name: nothing, **{unused: nn.Identity() for unused in (norm, norm_after) if unused}})

    def _watched(self, i: int, record: Record) -> nn.Module:
        """Layer i, showing `record` what each sublayer adds."""
        layer = self._layers[i]
        modules: dict[str, nn.Module] = {}
        for sublayer, part in enumerate(self._parts):
            last = part.norm_after or part.module

            def show(output: torch.Tensor, sublayer: int = sublayer) -> None:
                record(i, sublayer, output)

            modules[last] = _Watched(layer.get_submodule(last), show)
        return _copy(layer, modules)


def _copy(layer: nn.Module, modules: dict[str, nn.Module]) -> nn.Module:
    """A layer with the same weights, and other modules under some names."""
    twin = copy.copy(layer)
    vars(twin).pop("forward", None)  # of the class, but bound to the layer itself
    twin._modules = {**layer._modules, **modules}
    return twin
