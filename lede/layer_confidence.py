"""Which layers to leave out, from how sure each one is: the arithmetic of ConfLayers, without a model.

A layer's value is compared with those of its neighbours; a layer that is less sure than they are is left out. How many
neighbours count grows with the depth and with how much the values fluctuate there.

Layers are numbered 1..L as exit layers are; the first and the last are never left out (the papers' 1..L-2, counted from
0). Everything is float64.

Source: ConfLayers (arXiv 2604.14612), its selection of layers. Where the paper is silent, the comments say what is our
choice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ALPHA_STEP = 5
"""Growth of the windows for each leading tie of the fluctuation."""
STRENGTH_STEP = 0.05
"""What lambda changes by when too few or too many layers were left out."""
TOO_MANY = 0.25
"""Share of layers left out beyond the wanted one that is too many."""
TIE = 1e-6
"""Fluctuations that differ by less, in standard deviations of the values, are equal: confidences are float32, and their
rounding must not decide."""

_ROUNDING = 1e-9  # a product that should be whole must not fall below it


def first_layers(n_layers: int) -> frozenset[int]:
    """The layers left out before any search: every second one, beginning with layer 2."""
    return frozenset(range(2, n_layers, 2))


def share_of(share: float, count: int) -> int:
    """floor(share * count), where a product that is whole but for rounding counts as whole."""
    return int(share * count + _ROUNDING)


def fewest_layers(n_layers: int, skip_ratio: float) -> int:
    """K = floor((L - 2) * ratio) + 1: a smaller set is not worth trying."""
    return share_of(skip_ratio, n_layers - 2) + 1


def layer_values(confidence: npt.ArrayLike) -> Array:
    """c_i: confidence of the attention output plus that of the MLP output.

    Args:
        confidence: `(layer, 2)`.

    Returns:
        `(layer,)`.

    Raises:
        ValueError: The shape is another, there are fewer than 3 layers, or a value is no number.
    """
    values = np.asarray(confidence, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] < 3 or values.shape[1] != 2:
        raise ValueError(f"confidence must be (layer, 2) of at least 3 layers, got {values.shape}")
    if not np.isfinite(values).all():
        layers = sorted({int(i) + 1 for i in np.argwhere(~np.isfinite(values))[:, 0]})
        raise ValueError(
            f"the confidence of layers {layers} is no number; do the model's states overflow in its dtype?"
        )
    total: Array = values.sum(axis=1)
    return total


def standardise(values: Array) -> Array:
    """z: values less their mean, over their standard deviation + 1e-6."""
    z: Array = (values - values.mean()) / (values.std() + 1e-6)
    return z


def second_difference(z: Array) -> Array:
    """The gradient of the gradient: central differences inside, one-sided ones at the ends."""
    return np.asarray(np.gradient(np.gradient(z)), dtype=np.float64)


def leading_ties(g: Array) -> int:
    """How many entries at the start equal the first one; itself counts."""
    apart = np.flatnonzero(np.abs(g - g[0]) > TIE)
    return int(apart[0]) if apart.size else int(g.size)


def centred(g: Array) -> Array:
    """Bring g to [0, 1] with mean 0.5: min-max, then the widest affine map about the mean that stays inside.

    Equal values all become 0.5.
    """
    spread = float(g.max() - g.min())
    if spread <= TIE:
        return np.full_like(g, 0.5)
    unit = (g - g.min()) / spread
    mean = float(unit.mean())
    return np.asarray(np.clip(0.5 + (unit - mean) * 0.5 / max(mean, 1 - mean), 0.0, 1.0), dtype=np.float64)


def adaptive_windows(z: Array, capped: bool = False) -> npt.NDArray[np.int64]:
    """Width of every layer's window: 2 + floor(alpha * g_i * i / L), i = 1..L, where alpha = 5 * leading ties of g.

    Args:
        z: Standardised values, `(layer,)`.
        capped: Whether alpha is at most floor(L / 3), as the authors' code has it for Qwen models.

    Returns:
        `(layer,)`.
    """
    n, g = z.size, second_difference(z)
    alpha = ALPHA_STEP * leading_ties(g)
    if capped:
        alpha = min(alpha, n // 3)
    growth = alpha * centred(g) * np.arange(1, n + 1) / n
    return 2 + np.floor(growth + _ROUNDING).astype(np.int64)


def thresholds(z: Array, windows: npt.ArrayLike, strength: float) -> Array:
    """Mean less lambda times standard deviation of each layer's neighbours, the half window on either side.

    The layer itself is none of them, and windows end where the layers do. The standard deviation is that of the
    neighbours as a population (our choice: one neighbour has 0).

    Args:
        z: Standardised values, `(layer,)`.
        windows: Width of each layer's window, at least 2, or one for all.
        strength: lambda.
    """
    limits = np.empty_like(z)
    for i, width in enumerate(np.broadcast_to(np.asarray(windows, dtype=np.int64), z.shape)):
        half = int(width) // 2
        near = np.concatenate([z[max(0, i - half) : i], z[i + 1 : i + 1 + half]])
        limits[i] = near.mean() - strength * near.std()
    return limits


def skipped_layers(z: Array, limits: Array) -> frozenset[int]:
    """The layers below their threshold, but for the first and the last."""
    return frozenset(int(i) + 1 for i in np.flatnonzero(z < limits) if 0 < i < z.size - 1)


def select_layers(
    confidence: npt.ArrayLike, strength: float, window: int | None = None, capped: bool = False
) -> frozenset[int]:
    """The layers to leave out.

    Args:
        confidence: Of attention and MLP outputs, `(layer, 2)`.
        strength: lambda: how many standard deviations below its neighbours a layer must be.
        window: A fixed width for every layer; None adapts it.
        capped: Whether alpha is capped, see `adaptive_windows`.

    Raises:
        ValueError: The confidence is unusable, see `layer_values`.
    """
    z = standardise(layer_values(confidence))
    windows = adaptive_windows(z, capped) if window is None else np.asarray(window)
    return skipped_layers(z, thresholds(z, windows, strength))


def adapt_strength(strength: float, n_skipped: int, n_layers: int, skip_ratio: float) -> float:
    """The next selection's lambda; less of it skips more layers.

    It goes down where fewer than K layers were left out, which is too few to try.

    Departs from the published code: that compares the share with the wanted one. Where (L - 2) * ratio is whole, a
    set with just that share is then too small to be tried, but not small enough for another lambda, and the search
    stands still.

    Args:
        strength: lambda of this selection.
        n_skipped: Layers that it left out.
        n_layers: L.
        skip_ratio: Wanted share of the L - 2 layers.
    """
    share = n_skipped / (n_layers - 2)
    if share > skip_ratio + TOO_MANY:
        return strength + STRENGTH_STEP
    return strength - STRENGTH_STEP if n_skipped < fewest_layers(n_layers, skip_ratio) else strength
