"""What a round may do before any head read: the answers of `Policy.pre_scan`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PreScan(enum.Enum):
    """What to do before any head read, other than drafting blind."""

    SKIP = "skip"
    """Plain pass, no draft."""
    SCAN = "scan"
    """Look at the candidates."""


@dataclass(frozen=True)
class ExitAt:
    """A draft plan: layers 1..exit_layer draft, all layers verify."""

    exit_layer: int
    """Layers that a drafted token goes through."""
    length: int | None = None
    """Tokens drafted, if the budget and `max_draft` allow for as many, none of which is looked at or asked about; None
    asks before each but the first."""

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"a draft of a fixed length must have at least 1 token, got {self.length}")


@dataclass(frozen=True)
class SkipSublayers:
    """A draft plan with gaps: the whole stack drafts, but for these sublayers; all layers verify.

    Layers are numbered like exit layers: layer i is the i-th of 1..L.
    """

    attention: frozenset[int]
    """Layers whose attention is left out."""
    mlp: frozenset[int]
    """Layers whose MLP is left out."""

    @property
    def prefix(self) -> int:
        """Layers before the first gap; verification takes their states from the draft."""
        return min(self.attention | self.mlp) - 1

    @property
    def n_skipped(self) -> int:
        """Sublayers left out."""
        return len(self.attention) + len(self.mlp)

    def skipped_share(self, n_layers: int) -> float:
        """Sublayers left out over all `2 n_layers` of them."""
        return self.n_skipped / (2 * n_layers)

    def check(self, n_layers: int) -> None:
        """Raise ValueError unless the plan leaves something out, and nothing outside layers 2..L-1.

        Source: SWIFT (arXiv 2410.06916) and ConfLayers (arXiv 2604.14612) keep the first and the last layer whole.
        """
        layers = self.attention | self.mlp
        if not layers:
            raise ValueError("a plan with gaps must leave out at least one sublayer, got none; skip the draft instead")
        if min(layers) < 2 or max(layers) > n_layers - 1:
            raise ValueError(
                f"sublayers of layers {sorted(layers)} can't be left out; a model with {n_layers} layers allows "
                f"2..{n_layers - 1}"
            )


@dataclass(frozen=True)
class Lookup:
    """A draft plan without a model: tokens copied from where the end of the text has been before (`lede.lookup`).

    Where it has not been anywhere the round is a plain pass. A copied token that ends the text ends the draft.
    """

    length: int
    """Tokens copied, at most; the budget allows for fewer, `max_draft` does not count."""
    prune_at: int | None = None
    """Layer, of 1..L-1, at which the draft is cut behind the first token that is not the likeliest there; the rest is
    not verified. It costs a head read at every position. None verifies all of it."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a lookup must copy at least 1 token, got {self.length}")

    def check(self, n_layers: int) -> None:
        """Raise ValueError unless the layer that prunes, if any, is one of 1..L-1."""
        if self.prune_at is not None and not 1 <= self.prune_at <= n_layers - 1:
            raise ValueError(
                f"a lookup can be pruned at layers 1..{n_layers - 1} of a model with {n_layers} layers, got "
                f"{self.prune_at}"
            )


Plan = PreScan | ExitAt | SkipSublayers | Lookup
"""What the pre-scan may answer."""
