"""A cost profile on the terminal, 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lede.cost_measurement import MAX_Q
from lede.cost_model import Measurement
from lede.cost_profile import DRAFT_LENGTH, CostProfile
from lede.features import WALL_CLOCK_FEATURES, FeatureConfig

_ASKED = FeatureConfig(WALL_CLOCK_FEATURES)

_NAMES = {
    "embed": "embedding",
    "head": "head read",
    "observe": "observation",
    "features": ".. of top 1 and 2",
    "features_entropy": ".. and entropy",
    "features_top_k": ".. and top k",
    "policy": "policy call",
    "choose": "greedy choice",
    "index": "index of the text",
    "propose": "proposal from it",
}


def report(profile: CostProfile) -> Group:
    """What was measured, and what follows from it."""
    context = profile.contexts[0]
    where = (
        f"{profile.model}: {profile.costs.n_layers} layers, {profile.dtype} on {profile.device} "
        f"({profile.device_name}), {profile.threads} thread(s); median of {profile.repeats} (quartiles)"
    )
    ratios = profile.verification_ratios()
    facts = Text(
        f"head read / layer: {profile.head_over_layer():.2f}\n"
        f"fit off by {profile.residuals['all']:.1%} (root mean square): "
        + ", ".join(f"{kind} {profile.residuals[kind]:.1%}" for kind in ("layers", "head", "verify"))
    )
    parts: list[RenderableType] = [
        Text(where),
        _operations(profile),
        Text(f"verify(q) / verify(1) behind {context} tokens, from the middle candidate on"),
        _ratios(list(ratios), list(ratios.values())),
        Text(f"drafting behind {context} tokens, over a plain pass; asked: with a learned decision"),
        _drafts(profile),
        facts,
    ]
    return Group(*parts)


def _operations(profile: CostProfile) -> Table:
    ends = sorted({profile.contexts[0], profile.contexts[-1]})  # more columns would not fit
    shown = _table("one token", *(f"behind {context}" for context in ends))
    depth = profile.costs.n_layers

    def add(name: str, kind: str, q: int, first: int, last: int) -> None:
        found = [m for m in profile.of_kind(kind) if (m.q, m.first, m.last) == (q, first, last)]
        shown.add_row(name, *(_time(m) for m in found if m.context in (0, *ends)))

    for kind, name in _NAMES.items():
        add(name, kind, 1, 0, 0)
    for name, span in {"first layer": (0, 1), "last layer": (depth - 1, depth), "all layers": (0, depth)}.items():
        add(name, "layers", 1, *span)
    for q in (1, MAX_Q // 2, MAX_Q):
        add(f"full pass, q = {q}", "verify", q, 0, depth)
    return shown


def _ratios(qs: Sequence[int], ratios: Sequence[float]) -> Table:
    half = (len(qs) + 1) // 2
    shown = _table("q", *map(str, qs[:half]))
    shown.add_row("", *(f"{ratio:.2f}" for ratio in ratios[:half]))
    shown.add_row("q", *map(str, qs[half:]), style="bold")
    shown.add_row("", *(f"{ratio:.2f}" for ratio in ratios[half:]))
    return shown


def _drafts(profile: CostProfile) -> Table:
    shown = _table("layer", "draft", "asked", f"break-even acceptance, {DRAFT_LENGTH} drafted")
    for layer in profile.candidates:
        wanted = profile.break_even(layer)
        shown.add_row(
            str(layer),
            f"{profile.draft_share(layer):.2f}",
            f"{profile.draft_share(layer, _ASKED):.2f}",
            "never pays" if wanted is None else f"{wanted:.2f}",
        )
    return shown


def _table(*columns: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right")
    return shown


def _time(measurement: Measurement) -> str:
    """A median and its quartiles, in microseconds or, from 1 ms on, in milliseconds."""
    m = measurement
    scale, unit, digits = (1e6, "µs", 1) if m.seconds < 1e-3 else (1e3, "ms", 2)
    low, middle, high = (f"{value * scale:.{digits}f}" for value in (m.lower, m.seconds, m.upper))
    return f"{middle} {unit} ({low}-{high})"
