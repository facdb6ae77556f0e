"""transformers models that came through the bridge, wrapped once each."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from lede.models import EarlyExitModel

_ATTRIBUTE = "_lede_bridged"


@dataclass(frozen=True)
class _Bridged:
    """A wrapped model and what it was made of."""

    model: EarlyExitModel
    parts: tuple[nn.Module, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the transformers model starts without a wrapper; so does one that was pickled."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def bridged_model(hf_model: Any, tokenizer: Any = None) -> EarlyExitModel:
    """The transformers model as an EarlyExitModel, the same object as long as nothing in it was exchanged.

    The wrapper is kept on the model itself and goes with it.

    Args:
        hf_model: The model, as transformers' `generate` passes it.
        tokenizer: Its tokenizer, where the caller has one.

    Raises:
        UnsupportedModelError: Its architecture isn't supported.
    """
    parts = tuple(hf_model.modules())
    kept: _Bridged | None = hf_model.__dict__.get(_ATTRIBUTE)
    same = kept is not None and len(kept.parts) == len(parts) and all(map(is_, kept.parts, parts))
    # a model in training mode may be refused, which the wrapper does when it is made
    if (
        kept is not None
        and same
        and not hf_model.training
        and kept.model.hf_model is hf_model
        and kept.model.tokenizer is tokenizer
    ):
        return kept.model
    model = EarlyExitModel(hf_model, tokenizer, getattr(hf_model, "name_or_path", None) or None)
    hf_model.__dict__[_ATTRIBUTE] = _Bridged(model, parts)
    return model
