"""What is tried when a policy is given by its name alone: small grids over the settings that its paper leaves open.

Values are ours, chosen around the published defaults (`lede.policies`) and for texts of any length: a search that needs
100 new tokens before it begins would never begin in a text of 64.
"""

from __future__ import annotations

from lede.features import default_candidates
from lede.tuning_race import Axis, Setting, Space, Value

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
"""Draft lengths of a static policy."""
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Acceptance rates that draft-verify may be steered to."""
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds that draft-verify may begin with: in short texts it hardly gets away from it."""
HEAD_COSTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Layers that a head read may count as for del; the paper's is 0."""
SKIP_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.6)
"""Shares of the layers that swift and conflayers may leave out."""
OPT_INTERVALS = (1, 2, 4, 8, 16)
"""Rounds between two proposals of swift."""
INTERVALS = (2, 4, 8, 15, 30)
"""Rounds that a set of conflayers may be tried for."""
LOOKUPS = (2, 3, 5, 8, 10, 15, 20)
"""Tokens that prompt-lookup may propose."""
STOPS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Probabilities below which swift and conflayers end a draft; published is 0.8, which a flat model hardly passes."""
TEXT_SHARE = 4
"""The searches of swift and conflayers look at a window of at most this part of a text (1 / TEXT_SHARE)."""

FITTED = ("threshold", "lookup")
"""Names whose settings are played on recorded texts first, so that only the best of them are raced by the clock."""
TUNED = (
    "static", "lookup", "threshold", "draft-verify", "del", "swift", "conflayers", "assistant-early-exit",
    "prompt-lookup",
)  # fmt: skip
"""Names that are tuned where they are given alone; everybody else is taken as it is."""


def coarse_layers(n_layers: int) -> tuple[int, ...]:
    """Exit layers that are tried first: the default candidates and one deep layer."""
    return tuple(sorted({*default_candidates(n_layers), 3 * n_layers // 4} - {0, n_layers}))


def space_of(name: str, n_layers: int, max_new_tokens: int) -> Space:
    """The settings to try for a policy given by name.

    Args:
        name: One of `TUNED`, but for those of `FITTED` (`lede.threshold_fit`, `lede.lookup_fit`).
        n_layers: Layers of the model.
        max_new_tokens: Budget of the texts, in tokens.

    Raises:
        ValueError: There is nothing to tune by that name.
    """
    layers = Axis("exit_layer", tuple(range(1, n_layers)), coarse_layers(n_layers))
    if name == "static":
        return Space((layers, Axis("draft_length", LENGTHS, (2, 4, 8))))
    if name == "draft-verify":
        return Space((layers, Axis("target", TARGETS, (0.9,)), Axis("threshold", THRESHOLDS, (0.3, 0.6))))
    if name == "del":
        stops: tuple[Value, ...] = ("both", "length", "confidence")
        return Space(
            (
                Axis("every_layer", (False, True), (False, True)),
                Axis("stop", stops, stops),
                Axis("head_cost", HEAD_COSTS, (0.0, 1.0)),
            )
        )
    if name == "swift":
        return Space((_ratios(), Axis("opt_interval", OPT_INTERVALS, (1, 4)), _window(50, max_new_tokens), _stops()))
    if name == "conflayers":
        fitting = tuple(n for n in INTERVALS if n <= max(INTERVALS[0], max_new_tokens // TEXT_SHARE))
        intervals = Axis("interval", fitting, fitting[:1] if len(fitting) < 3 else (fitting[1], fitting[-1]))
        return Space((_ratios(), intervals, _window(100, max_new_tokens), _stops()))
    if name == "assistant-early-exit":
        return Space((Axis("layer", layers.values, layers.coarse),))
    if name == "prompt-lookup":
        return Space((Axis("tokens", LOOKUPS, LOOKUPS),))
    raise ValueError(f"there is nothing to tune for '{name}'; tuned are {', '.join(TUNED)}")


def _ratios() -> Axis:
    return Axis("skip_ratio", SKIP_RATIOS, (0.2, 0.4))


def _stops() -> Axis:
    return Axis("stop_threshold", STOPS, (0.4, 0.8))


def _window(published: int, max_new_tokens: int) -> Axis:
    """The published window of new tokens that a search looks at, or as much as such texts have room for."""
    fitting = (max(1, min(published, max_new_tokens // TEXT_SHARE)),)
    return Axis("context_window", fitting, fitting)


def text_of(name: str, setting: Setting) -> str:
    """The setting as a command line gives it; one without a key is such a text already."""
    if setting and not setting[0][0]:
        return str(setting[0][1])
    return f"{name}:{';'.join(f'{key}={_spell(value)}' for key, value in setting)}"


def texts_space(texts: tuple[str, ...]) -> Space:
    """A space of given texts, in the order of their neighbourhood."""
    return Space((Axis("", texts, texts),))


def _spell(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
