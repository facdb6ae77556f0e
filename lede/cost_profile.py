"""A cost profile: what decoding costs on one model and machine, as measured and as fitted, and where that holds."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lede.cost_model import CostModel, Costs, Measurement
from lede.features import FeatureConfig

SCHEMA_VERSION = 2
DRAFT_LENGTH = 4
"""Drafted tokens of the round that break-even is told for."""


def acceptance_for(tokens: float, length: int) -> float | None:
    """The acceptance a at which drafts of `length` tokens bring so many a round, 1 + a + ... + a^length.

    None when not even drafts that are always accepted bring that.
    """
    if tokens > length + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < tokens else (low, middle)
    return high


@dataclass(frozen=True)
class CostProfile:
    """Measured seconds, the cost model fitted to them, and where they hold."""

    model: str
    """What the model was loaded from."""
    fingerprint: dict[str, Any]
    """Of the model; see `lede.fingerprints`."""
    candidates: tuple[int, ...]
    """Candidate layers."""
    contexts: tuple[int, ...]
    """Context lengths that were measured, in tokens."""
    repeats: int
    """Times that each operation was measured."""
    device: str
    """Device, such as cpu or cuda:0."""
    device_name: str
    """The processor's or accelerator's own name."""
    threads: int
    """Threads of torch on the CPU."""
    dtype: str
    """Dtype of the hidden states."""
    attention: str
    """Attention that transformers ran."""
    versions: dict[str, str]
    """Versions of lede and of what decoding depends on."""
    measurements: tuple[Measurement, ...]
    """Every operation, with median and quartiles."""
    costs: CostModel
    """The fitted model."""
    residuals: dict[str, float]
    """Root mean square of (predicted / measured - 1) by kind of operation, and over `all`."""
    compiled: bool = False
    """Whether the model's layers were compiled."""
    packed: bool = False
    """Whether its weights were packed."""

    def head_over_layer(self) -> float:
        """A head read in layers, both measured at one token and the shortest context."""
        layer = statistics.median(
            m.seconds for m in self.of_kind("layers") if m.last == m.first + 1 and m.context == self.contexts[0]
        )
        return next(m.seconds for m in self.of_kind("head") if m.q == 1) / layer

    def verification_ratios(self, context: int | None = None) -> dict[int, float]:
        """Measured seconds of verifying q tokens over those of one, by q, from the middle candidate on.

        At the shortest context unless another one that was measured is given.
        """
        context = self.contexts[0] if context is None else context
        layer = self.candidates[len(self.candidates) // 2]
        spent = {m.q: m.seconds for m in self.of_kind("verify") if m.first == layer and m.context == context}
        if not spent:
            raise ValueError(f"context {context} was not measured; {', '.join(map(str, self.contexts))} were")
        return {q: seconds / spent[1] for q, seconds in sorted(spent.items())}

    def draft_share(self, layer: int, features: FeatureConfig | None = None, context: int | None = None) -> float:
        """Seconds of one drafted token over those of a plain pass; with the decision of a policy that has features."""
        context = self.contexts[0] if context is None else context
        return self.costs.draft_seconds(layer, context, features) / self.costs.plain_seconds(context)

    def break_even(self, layer: int, length: int = DRAFT_LENGTH, context: int | None = None) -> float | None:
        """The acceptance at which blind drafts of `length` tokens from a layer are as fast as plain decoding.

        Each drafted token is taken to be accepted with that probability, if those before it were. None when not even
        drafts that are always accepted pay.
        """
        context = self.contexts[0] if context is None else context
        seconds = self.costs.round_seconds(context, (), layer, length, features=None)
        return acceptance_for(seconds / self.costs.plain_seconds(context), length)

    def of_kind(self, kind: str) -> list[Measurement]:
        """The measurements of one operation."""
        return [m for m in self.measurements if m.kind == kind]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, content: Any) -> CostProfile:
        """The profile from what `to_json` gave.

        Raises:
            ValueError: It is no profile, or one of another schema version.
        """
        if not isinstance(content, dict) or "schema_version" not in content:
            raise ValueError("this is no cost profile; make one with `lede profile`")
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"the cost profile has schema version {content['schema_version']}, wanted {SCHEMA_VERSION}; "
                "make it again with `lede profile`"
            )
        try:
            since = {"compiled": False, "packed": False}  # profiles of before they could be say nothing
            values = {field.name: content[field.name] for field in fields(cls) if field.name not in since}
            values |= {name: content.get(name, before) for name, before in since.items()}
            costs = values["costs"]
            values["costs"] = CostModel(
                costs["n_layers"],
                tuple(costs["windows"]),
                Costs(**costs["costs"]),
                *(tuple((int(at), float(ratio)) for at, ratio in costs[name]) for name in ("again", "blocks")),
            )
            values["measurements"] = tuple(Measurement(**m) for m in values["measurements"])
            values["candidates"], values["contexts"] = tuple(values["candidates"]), tuple(values["contexts"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the cost profile is damaged: {error}; make it again with `lede profile`") from error

    def save(self, path: Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        from lede.atomic import write_atomically

        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> CostProfile:
        """Read a profile from its file.

        Raises:
            ValueError: The file can't be read, or holds no profile.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_bytes()))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
