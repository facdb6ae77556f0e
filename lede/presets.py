"""Sets of contenders that answer one question each: `lede bench --preset`.

- `ablation`: a learned policy in full, with a fixed length, and with a fixed layer. Source: LEDE (arXiv 2606.03113),
  table 3.
- `transfer`: what is found on the validation prompts of one suite, frozen, on the test prompts of every suite. Source:
  ConfLayers (arXiv 2604.14612) and SWIFT (arXiv 2410.06916), transfer of skip sets.
- `window`: ConfLayers with adaptive and with fixed windows, its confidence read through the head or off the states.
  Source: ConfLayers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lede.policies import POLICIES
from lede.policies.ablated import AblatedPolicy
from lede.policies.learned import LearnedPolicy
from lede.policies.survival import SurvivalPolicy
from lede.rivals import is_rival
from lede.tuned import Tuned, as_it_is, is_tuned

if TYPE_CHECKING:
    from lede.bench_row import BenchRow
    from lede.tuning import Tuner

Preset = Literal["ablation", "transfer", "window"]

MOVED = ("conflayers", "swift")
"""Policies whose sets are found on one suite and moved to the others."""
WINDOWS = ("adaptive", "10", "20")
CONFIDENCES = ("head", "hidden")

_FROM = " from "


@dataclass(frozen=True)
class Named:
    """A contender that a preset adds."""

    name: str
    """What tables call it."""
    tuned: Tuned
    """The contender, ready to be measured."""


def preset_contenders(preset: Preset, suite: str, tuners: Mapping[str, Tuner], names: Mapping[str, str]) -> list[Named]:
    """The contenders that a preset adds on a suite, beside the policies themselves.

    Args:
        preset: The preset.
        suite: Name of the suite.
        tuners: The tuner of every suite, by name; what they have in tuning.json is not done again.
        names: What tables call the policies of the command line, by what was given.

    Raises:
        ValueError: The preset needs a learned policy and there is none, or a contender can't be made.
    """
    if preset == "ablation":
        folders = learned_folders(list(names))
        return [each for folder in folders for each in ablation(tuners[suite], folder, names[folder])]
    if preset == "window":
        return window(tuners[suite])
    if preset == "transfer":
        return transfer(tuners)
    raise ValueError(f"there is no preset '{preset}'; presets are ablation, transfer, window")


def learned_folders(policies: Sequence[str]) -> list[str]:
    """The arguments that are folders of learned policies.

    Raises:
        ValueError: There are none.
    """
    given = [text for text in policies if not is_tuned(text) and not is_rival(text) and text != "plain"]
    found = [text for text in given if isinstance(as_it_is(text).policy, LearnedPolicy | SurvivalPolicy)]
    if not found:
        raise ValueError("the preset ablation takes a learned policy apart; give its folder as --policy")
    return found


def ablation(tuner: Tuner, folder: str, name: str) -> list[Named]:
    """A learned policy with what it decides held fixed, one decision at a time.

    The length is its mean on the validation prompts, rounded, and the layer the one that most of its rounds draft at.
    A policy that never drafts there has nothing to hold fixed: a warning says so, and there is no contender.

    Args:
        tuner: Of the suite.
        folder: The policy.
        name: What tables call it.

    Raises:
        ValueError: There is no validation prompt, or every decode failed.
    """
    usage, whole = tuner.usage(folder), as_it_is(folder)
    if not usage.exit_layer:
        warnings.warn(
            f"{folder} never drafts on the validation prompts of {tuner.suite}: no length or layer to hold fixed",
            stacklevel=2,
        )
        return []
    length, layer = max(1, round(usage.draft_length)), usage.exit_layer
    cost = replace(
        whole.cost,
        search_seconds=whole.cost.search_seconds + usage.seconds,
        evaluations=whole.cost.evaluations + usage.evaluations,
    )
    found = []
    for part, key, value in (("length", "draft_length", length), ("layer", "exit_layer", layer)):
        text = f"ablated:base={folder};{key}={value}"
        policy = AblatedPolicy.of(folder, **{key: value})
        found.append(Named(f"{name}, fixed {part} {value}", Tuned(policy, text, text, cost)))
    return found


def window(tuner: Tuner) -> list[Named]:
    """ConfLayers, tuned once, with every window and every confidence; nothing else differs between them."""
    tuned = tuner.tune("conflayers")
    return [
        Named(
            f"conflayers, window {width}, {confidence}",
            replace(as_it_is(f"{tuned.settings};window={width};confidence={confidence}"), cost=tuned.cost),
        )
        for confidence in CONFIDENCES
        for width in WINDOWS
    ]


def transfer(tuners: Mapping[str, Tuner]) -> list[Named]:
    """The skip sets found on each suite, frozen; on the suite that they were found on too, to compare with.

    Learned policies are frozen as they are: in the matrix they stand under their own names.
    """
    return [
        Named(f"{method}{_FROM}{source}", tuner.tune(method, keep_state=True))
        for method in MOVED
        for source, tuner in tuners.items()
    ]


@dataclass(frozen=True)
class Cell:
    """A policy from one suite on another."""

    speedup: float | None
    """Over plain decoding; None where nothing was decoded."""
    acceptance: float | None
    """Accepted over drafted tokens; None where nothing was drafted."""


Matrix = dict[str, dict[str, dict[str, Cell]]]
"""Cells by method, by the suite that the policy was found on, and by the suite that it ran on."""


def transfer_matrix(rows: Sequence[BenchRow]) -> Matrix:
    """The rows of a `transfer` benchmark by where a policy comes from and where it went.

    A learned policy, whose suite nobody tells, has its own name in place of the suite, under the method `learned`.
    """
    found: Matrix = {}
    for row in rows:
        method, _, source = row.name.partition(_FROM)
        if method not in MOVED or not source:
            if row.kind != "policy" or row.policy.partition(":")[0] in POLICIES:
                continue  # no folder
            if row.exact is None:
                continue  # it never ran
            method, source = "learned", row.name
        speed = None if row.speedup_over_plain is None else row.speedup_over_plain.value
        found.setdefault(method, {}).setdefault(source, {})[row.suite] = Cell(speed, row.acceptance_rate)
    return found


def transfer_table(rows: Sequence[BenchRow]) -> str:
    """The matrix as markdown, a table a method: speed over plain and acceptance; empty when nothing was moved."""
    tables = []
    for method, sources in transfer_matrix(rows).items():
        targets = list(dict.fromkeys(target for cells in sources.values() for target in cells))
        lines = [
            f"| {method}, found on | {' | '.join(f'on {target}' for target in targets)} |",
            f"|---|{'---|' * len(targets)}",
        ]
        for source, cells in sources.items():
            shown = [_shown(cells.get(target), own=target == source) for target in targets]
            lines.append(f"| {source} | {' | '.join(shown)} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def sweep_contenders(tuned: Tuned, k: int) -> list[Named]:
    """The next best settings of a sweep, for the best in hindsight."""
    return [Named(each.settings, each) for each in tuned.runners_up(k)]


def _shown(cell: Cell | None, own: bool) -> str:
    if cell is None or cell.speedup is None:
        return "-"
    share = "-" if cell.acceptance is None else f"{cell.acceptance:.2f}"
    text = f"{cell.speedup:.2f}x, {share}"
    return f"**{text}**" if own else text
