"""An evaluation on the terminal, 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lede.evaluation_results import Evaluation, PolicyResult
from lede.intervals import Interval
from lede.regret import PARTS
from lede.round_log import SOURCES

_CLAIRVOYANT = "clairvoyant"
_MOST_LAYERS = 14  # columns that leave room for a name
_LEGEND = (
    "simulated; tok/s and speedup over plain decoding are ratios of sums over prompts, with 95 % bootstrap intervals "
    "by prompt; accepted: of drafted tokens; length, layer: means of rounds that draft; reads: head reads a token"
)
_LEGEND_REGRET = "share of each policy's own seconds; the clairvoyant's share is how near the policy comes to its speed"


def report(found: Evaluation) -> Group:
    """What was found, as tables."""
    n = found.n_branches
    where = (
        f"{found.model}: {found.n_prompts} prompts, {found.n_tokens} tokens, {n or 'no'} branches; costs of "
        f"{found.profile}; plain {found.plain_rate:.1f} tok/s"
    )
    parts: list[RenderableType] = [Text(where), _speeds(found), Text(_LEGEND, style="dim")]
    parts += [
        Text(f"{each.name}: {_share(each.of_reference)} of the best reference, on the same prompts")
        for each in found.policies
        if each.of_reference is not None and not each.reference
    ]
    if n:
        parts.append(Text("\nspeedup if the drafter saw the target's text after a wrong draft (no branches)"))
        parts.append(_without_branches(found))
    if any(each.sources["lookup"][0] for each in found.policies):
        parts += [Text("\nrounds / their tokens by source of the draft, in %"), _sources(found)]
    parts += [Text("\nrounds by exit layer, in %"), *_layers(found)]
    parts += [Text("\nwhere the time goes, in %"), _regret(found), Text(_LEGEND_REGRET, style="dim")]
    if any(each.off_policy is not None for each in found.policies):
        parts += [Text("\nreward of a token in the paper's process"), _off_policy(found)]
    parts += [Text(note) for note in found.notes]
    return Group(*parts)


def _speeds(found: Evaluation) -> Table:
    compared = any(each.of_reference is not None for each in found.policies)
    shown = _table("policy", "tok/s", "speedup", "accepted", "length", "layer", "reads", *["of\nbest"] * compared)
    for each in found.policies:
        shown.add_row(
            _named(each),
            f"{each.rate.value:.1f}",
            _interval(each.speedup),
            "-" if each.acceptance is None else f"{each.acceptance.value:.2f}",
            _number(each.draft_length, 1),
            _number(each.exit_layer, 1),
            f"{each.head_reads:.1f}",
            *([f"{each.of_reference.value:.0%}" if each.of_reference is not None else "-"] * compared),
        )
    top = found.clairvoyant
    length, layer = _number(top.draft_length, 1), _number(top.exit_layer, 1)
    shown.add_row(
        _CLAIRVOYANT, f"{top.rate:.1f}", f"{top.speedup:.2f}", "1.00", length, layer, "", *[""] * compared, style="dim"
    )
    return shown


def _without_branches(found: Evaluation) -> Table:
    shown = _table("policy", "with branches", "without")
    for each in found.policies:
        without = each.speedup_without_branches
        shown.add_row(_named(each), _interval(each.speedup), "-" if without is None else _interval(without))
    return shown


def _layers(found: Evaluation) -> list[Table]:
    """As many tables as the layers need."""
    shares = [each.layer_shares for each in found.policies] + [found.clairvoyant.layer_shares]
    layers = sorted({layer for each in shares for layer in each if layer})
    names = [*map(_named, found.policies), Text(_CLAIRVOYANT)]
    tables = []
    for start in range(0, max(len(layers), 1), _MOST_LAYERS):
        columns = layers[start : start + _MOST_LAYERS]
        copies = any(each.sources["lookup"][0] for each in found.policies)
        shown = _table("policy", "none" if copies else "plain", *map(str, columns))
        for name, share in zip(names, shares, strict=True):
            shown.add_row(name, *(f"{100 * share[each]:.0f}" if each in share else "-" for each in (0, *columns)))
        tables.append(shown)
    return tables


def _sources(found: Evaluation) -> Table:
    shown = _table("policy", *SOURCES)
    for each in found.policies:
        shown.add_row(
            _named(each), *(f"{100 * a:.0f} / {100 * b:.0f}" for a, b in (each.sources[name] for name in SOURCES))
        )
    return shown


def _regret(found: Evaluation) -> Table:
    # nobody chooses the wrong one of a single source
    named = [name for name in PARTS if name != "wrong_source" or any(each.regret[name] for each in found.policies)]
    shown = _table("policy", "clair-\nvoyant", *(PARTS[name].replace(" ", "\n") for name in named))
    for each in found.policies:
        shares = [each.of_clairvoyant.value, *(each.regret[name] for name in named)]
        shown.add_row(_named(each), *(f"{round(100 * share, 1) + 0.0:.1f}" for share in shares))  # no -0.0
    return shown


def _off_policy(found: Evaluation) -> Table:
    shown = _table("policy", "fitted Q evaluation", "truth", "distance", "the log's behaviour")
    for each in found.policies:
        fit = each.off_policy
        if fit is not None:
            shown.add_row(
                _named(each), f"{fit.estimate:.3f}", f"{fit.truth:.3f}", f"{fit.distance:+.3f}", f"{fit.logged:.3f}"
            )
    return shown


def _named(result: PolicyResult) -> Text:
    return Text(result.name + (" (reference)" if result.reference else ""))


def _interval(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.lower:.2f}-{interval.upper:.2f})"


def _share(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} % ({100 * interval.lower:.1f}-{100 * interval.upper:.1f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(*columns: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for number, column in enumerate(columns):  # long names of policies wrap, figures never do
        named = number == 0
        shown.add_column(column, justify="left" if named else "right", no_wrap=not named, overflow="fold")
    return shown
