"""The settings of a sweep: what `--sweep key=value,value` means, and what the runs are called."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any, get_type_hints

from lede.policies.settings import settings_from_text
from lede.training_config import TrainConfig

_APART = {
    "buffer": "scores of other prompts don't compare",
    "validation": "scores on other prompts don't compare",
    "holdout": "scores on other prompts don't compare",
    "split_seed": "scores on other prompts don't compare",
    "profile": "scores under other costs don't compare",
    "branches": "scores with and without branches don't compare",
    "seed": "--seeds says how many are run",
    "out": "every run has a folder of its own in it",
    "resume": "it is for the sweep as a whole",
    "device": "no result depends on it",
    "checkpoint_interval": "no result depends on it",
}
"""Settings that are the same in all runs, and why."""

SWEPT = tuple(each.name for each in fields(TrainConfig) if each.name not in _APART)
"""Settings that can be swept."""

_LONGEST_NAME = 180
"""Characters of a folder's name; file systems take 255."""


@dataclass(frozen=True)
class Setting:
    """One point of the grid."""

    values: tuple[tuple[str, Any], ...]
    """Swept settings and their values, in the order given; empty if only seeds are compared."""

    @property
    def name(self) -> str:
        """The setting as it is typed, such as `n-steps=3,hidden=64x64`."""
        return ",".join(f"{flag(key)}={spell(value)}" for key, value in self.values)

    @property
    def spelled(self) -> tuple[str, ...]:
        """The values as they are typed."""
        return tuple(spell(value) for _, value in self.values)

    def run_name(self, seed: int) -> str:
        """Name of a run's folder: the setting and the seed."""
        name = self.name
        if len(name) > _LONGEST_NAME:
            name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return ",".join([*([name] if name else []), f"seed={seed}"])

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The configuration with this setting's values.

        Raises:
            ValueError: A value is out of range.
        """
        return replace(config, **dict(self.values))


def grid(sweeps: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Every combination of the values, the last key varying fastest; one empty setting if nothing is swept."""
    return [Setting(tuple(zip(sweeps, values, strict=True))) for values in itertools.product(*sweeps.values())]


def parse_sweeps(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values by setting, from texts like `n-steps=1,3` or `hidden=32x32,64x64`.

    Several numbers in one value are joined by x, several words by +; none, true and false are written so.

    Raises:
        ValueError: A text is no sweep, a key is unknown, or a value is not of the setting's type; a key or a value is
            given twice.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, sign, values = (part.strip() for part in text.partition("="))
        name = key.replace("-", "_")
        if not sign:
            raise ValueError(f"'{text}' is no sweep; sweeps look like n-steps=1,3 or hidden=32x32,64x64")
        if name in _APART:
            raise ValueError(f"{key} can't be swept: {_APART[name]}")
        if name not in SWEPT:
            raise ValueError(f"there is no setting '{key}' to sweep; settings are {', '.join(map(flag, SWEPT))}")
        if name in found:
            raise ValueError(f"{key} is swept twice; give all its values in one, as {key}=A,B")
        read = [_read(name, value.strip()) for value in values.split(",")]
        twice = {spell(value) for value in read if read.count(value) > 1}
        if twice:
            raise ValueError(f"{key} is given the value {', '.join(sorted(twice))} twice")
        found[name] = tuple(read)
    return found


def flag(name: str) -> str:
    """A setting's name as it is typed."""
    return name.replace("_", "-")


def spell(value: Any) -> str:
    """A value as it is typed, and as names of folders have it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ("+" if any(isinstance(part, str) for part in value) else "x").join(map(str, value))
    return value.replace(",", "x") if isinstance(value, str) else repr(value)


def _read(name: str, text: str) -> Any:
    """A value of the setting's type."""
    hint = get_type_hints(TrainConfig)[name]
    listed = "tuple" in str(hint)
    given = text
    if listed:
        given = re.sub(r"(?<=\d)x(?=\d)|\+", ",", text)
    elif re.fullmatch(r"\d+([x+]\d+)+", text):  # candidate layers
        given = re.sub(r"[x+]", ",", text)
    try:
        value = getattr(settings_from_text(make_dataclass("_One", [(name, hint)]), f"{name}={given}"), name)
    except ValueError as error:
        how = "" if not listed else ("; in a sweep numbers are joined by x and words by +, as 64x64 or depth+entropy")
        raise ValueError(f"{str(error).replace(name, flag(name))}{how}") from None
    if not re.fullmatch(r"[\w.+-]+", spell(value)):  # it is to name a folder
        raise ValueError(f"'{text}' can't be a value of {flag(name)} in a sweep")
    return value
