"""What a store was made with: its attributes, and what must agree before a collection goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from lede.buffers.records import BRANCH_DEPTH, StoreError
from lede.features import FeatureConfig, parse_candidates
from lede.fingerprints import compare_fingerprints
from lede.rewards import RewardConfig

Kind = Literal["transitions", "traces"]

SCHEMA_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)
"""Versions of the layout that this lede reads; 2 is the same without checksums of the settings and of commit records, 1
without branches too."""

FORMAT = "lede-store"
"""Attribute `format` of every store; what tells one from other zarr groups."""

_COMPARED = {"architecture", "tokenizer", "logits", "dtype"}  # what `compare_fingerprints` looks at


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of a store, kept as plain JSON in the attributes of its root group."""

    kind: Kind
    """`transitions` from rollouts, or `traces` from the teacher."""
    model: str
    """Name or folder of the model."""
    n_layers: int
    """Layers of the model, L."""
    vocab_size: int
    """Entries of its vocabulary."""
    candidates: tuple[int, ...]
    """Candidate layers, ascending within 1..L-1."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """Fingerprint of the model, see `lede.checkpoint`."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    """What an observation is made of."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What a decision earns."""
    seed: int = 0
    """Seed that every random stream of the collection comes from."""
    temperature: float = 0.0
    """Temperature of the target's text; 0 is greedy."""
    top_k: int | None = None
    """Tokens kept when sampling; None keeps all."""
    top_p: float | None = None
    """Probability mass kept when sampling; None keeps all."""
    max_new_tokens: int = 64
    """Budget of new tokens a prompt."""
    explore: str | None = None
    """Who acted: `uniform` or a policy; None where nobody did (traces)."""
    epsilon: tuple[float, float] | None = None
    """Exploration at the first and at the last prompt; None for none."""
    prompts_digest: str = ""
    """`prompts_digest` of the prompts, in order."""
    branch_share: float = 0.0
    """Share of wrong drafts that traces have a branch of; 0 for none."""
    branch_depth: int = BRANCH_DEPTH
    """Most positions that a branch follows."""
    chat: str = "auto"
    """Whether prompts went through the chat template."""
    schema_version: int = SCHEMA_VERSION
    """Version of the layout on disk; not compared, a version that can be read can be gone on with."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries in use when the store was made; for the record, not compared."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind of a store must be one of {list(get_args(Kind))}, got '{self.kind}'")
        object.__setattr__(self, "candidates", parse_candidates(self.candidates, self.n_layers))
        if not 0 <= self.branch_share <= 1 or self.branch_depth < 1:
            got = f"{self.branch_share} and {self.branch_depth}"
            raise ValueError(f"branch_share must be within 0..1 and branch_depth at least 1, got {got}")
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", (float(self.epsilon[0]), float(self.epsilon[1])))

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values, with the `format` that marks a store."""
        return {"format": FORMAT, **_plain(asdict(self))}

    @classmethod
    def from_json(cls, attributes: dict[str, Any], where: str) -> StoreSettings:
        """Settings back from the attributes of the root group.

        Args:
            attributes: What `to_json` gave.
            where: The store, for messages.

        Raises:
            StoreError: These are not the attributes of a store, or of a version that this one can't read.
        """
        if attributes.get("format") != FORMAT:
            raise StoreError(f"{where} is no store of lede: its attributes lack format '{FORMAT}'")
        version = attributes.get("schema_version")
        if version not in READABLE_VERSIONS:
            known_versions = f"{READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}"
            raise StoreError(f"{where} has schema version {version}, this lede reads {known_versions}: use a newer one")
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in attributes.items() if name in known}
        try:
            features = values.pop("features")
            values["features"] = FeatureConfig.from_json(features)
            values["reward"] = RewardConfig(**values["reward"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{where} has damaged attributes: {error}") from error

    def differences(self, other: StoreSettings) -> list[str]:
        """Fields that change the content of a store and are not equal, as `name: this / that`."""
        mine, theirs = self.to_json(), other.to_json()
        apart = ("versions", "model", "fingerprint", "schema_version")
        lines = [
            f"{name}: {mine[name]} / {theirs[name]}"
            for name in mine
            if mine[name] != theirs[name] and name not in apart
        ]
        return lines + _fingerprint_differences(self, other)

    def check_same(self, other: StoreSettings, where: str) -> None:
        """Raise ValueError naming every field in which a store and the settings of a resumed run differ.

        Args:
            other: Settings of the run.
            where: The store, for the message.
        """
        lines = self.differences(other)
        if lines:
            raise ValueError(
                f"{where} was made with other settings (store / now): {'; '.join(lines)}. "
                "Use the store's settings to resume it, or write to another path"
            )


def prompts_digest(prompts: Iterable[Sequence[int]]) -> str:
    """SHA-256 over the token ids of the prompts in order, each preceded by its length."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(np.asarray([len(ids), *ids], dtype="<i8").tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _fingerprint_differences(mine: StoreSettings, theirs: StoreSettings) -> list[str]:
    """Phrases for models that differ; names count only where there is no fingerprint to go by."""
    one, other = _plain(mine.fingerprint), _plain(theirs.fingerprint)
    names = [f"model: {mine.model} / {theirs.model}"] if mine.model != theirs.model else []
    if one == other:
        return [] if one else names
    if not (one.keys() >= _COMPARED and other.keys() >= _COMPARED):
        return [*names, f"fingerprint: {_short(one)} / {_short(other)}"]
    lines = [f"fingerprint: {phrase}" for phrase in compare_fingerprints(one, other)]
    if one["dtype"] != other["dtype"]:  # within the tolerance of a policy, but the content would be another
        lines.append(f"fingerprint.dtype: {one['dtype']} / {other['dtype']}")
    return [*names, *lines] if lines else []


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
