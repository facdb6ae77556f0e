"""The ConfLayers policy: leave out the layers that are less sure than their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lede.policies.layer_search import LayerSearch
from lede.policies.layer_skipping import LayerSkippingConfig, LayerSkippingPolicy

Confidence = Literal["head", "hidden"]
Stop = Literal["paper", "authors-code"]


@dataclass(frozen=True)
class ConfLayersConfig(LayerSkippingConfig):
    """Settings of a ConfLayers policy; the defaults are those of the authors' script."""

    confidence: Confidence = "head"
    """How sure an attention or MLP output is: "head" reads it through the final norm and the LM head, 1 - H / ln V;
    "hidden" takes the softmax over the width, 1 - H / ln d, as the authors' code does."""
    stop: Stop = "paper"
    """What ends the search beside the iterations: "paper" a score above max_score; "authors-code" that together with
    more than 4 accepted tokens a round."""
    window: Literal["adaptive"] | int = "adaptive"
    """Neighbours that a layer is compared with: "adaptive", or a fixed width for every layer."""
    cap_window: bool = False
    """Whether alpha, by which windows grow, is at most a third of the layers, as the authors' code has it for Qwen."""
    skip_ratio: float = 0.4
    """Wanted share of the layers 2..L-1 to leave out, at least."""
    context_window: int = 100
    """New tokens that a set is selected on. No set is selected in a text before it has two more than that: keep it well
    below the length of your texts."""
    probe_tokens: int = 16
    """Most of them, the last ones, that are read through the LM head; each costs two head reads a layer."""
    interval: int = 30
    """Rounds that a set is tried for."""
    max_iterations: int = 100
    """Sets tried at most."""
    max_score: float = 0.95
    """Share of drafted tokens accepted that ends the search."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("confidence", ("head", "hidden")), ("stop", ("paper", "authors-code"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got '{getattr(self, name)}'")
        if self.window != "adaptive" and (not str(self.window).isdigit() or int(self.window) < 2):
            raise ValueError(f"window must be adaptive or a whole number of at least 2, got {self.window!r}")
        for name in ("context_window", "probe_tokens", "interval", "max_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.skip_ratio < 1:
            raise ValueError(f"skip_ratio must be at least 0 and below 1, got {self.skip_ratio}")
        if not 0 <= self.max_score <= 1:
            raise ValueError(f"max_score must be within 0..1, got {self.max_score}")


class ConfLayersPolicy(LayerSkippingPolicy):
    """Drafts without the layers that confidence points out, and tries sets of them until one is good enough.

    Both sublayers of a layer are left out. When the iterations run out before any set was scored, the best set is empty
    and the policy drafts no more.

    Source: ConfLayers (arXiv 2604.14612): confidence through the LM head, adaptive windows and thresholds, search by
    intervals scored by accepted tokens.
    Departs from the paper: drafts are chains, not trees. Every value is float32 or better, and confidences that differ
    by rounding are equal. The context is the last tokens of the text at their own positions, and at most `probe_tokens`
    of them are read; lambda is adapted as in the authors' code, and also where a set is just too small to be tried.
    An interval is as many rounds as it says and the last set is scored too; the authors' code takes a round more and
    ends on the last selection. Confidences that are no numbers end the search. Where drafts are sampled, the
    probability of the likeliest token ends a draft, not that of the token that was drawn: a stop that depends on the
    draw changes the law of the text.
    """

    kind: ClassVar[str] = "conflayers"
    config_class: ClassVar[type[ConfLayersConfig]] = ConfLayersConfig
    config: ConfLayersConfig

    def _new_search(self, n_layers: int) -> LayerSearch:
        return LayerSearch(self.config, n_layers)
