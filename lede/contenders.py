"""The policies that an evaluation compares: their names, and whether they, the traces and the costs fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from lede.buffers.settings import StoreSettings
    from lede.cost_profile import CostProfile
    from lede.models import EarlyExitModel
    from lede.policies import Policy


@dataclass(frozen=True)
class Contender:
    """A policy that is evaluated."""

    name: str
    """What tables call it."""
    text: str
    """As it was given."""
    policy: Policy | None
    """The policy; None decodes plainly."""
    reference: bool
    """Whether it was given as a reference."""


def parse_contenders(policies: Sequence[str], references: Sequence[str]) -> list[Contender]:
    """Policies as the command line names them, each once; a reference that is also a policy counts as both.

    Raises:
        ValueError: One of them is no policy.
    """
    from lede.policies import parse_policy

    texts = list(dict.fromkeys([*policies, *references]))
    return [
        Contender(name, text, parse_policy(text), text in references)
        for name, text in zip(short_names(texts), texts, strict=True)
    ]


def short_names(texts: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """What tables call policies: a folder by the name of its run, where no other policy is called that."""
    short = [_short(text) for text in texts]
    all_names = [*short, *taken]
    return [name if all_names.count(name) == 1 else text for name, text in zip(short, texts, strict=True)]


def _short(text: str) -> str:
    """The name of a run's folder instead of the path of the policy in it."""
    path = Path(text)
    if ":" in text or not path.is_dir():
        return text
    parts = [part for part in path.resolve().parts[1:] if part != "policy"]
    return parts[-1] if parts else text


def check_contenders(settings: StoreSettings, profile: CostProfile, found: Sequence[Contender]) -> None:
    """Raise ValueError unless traces, profile and policies belong together."""
    from lede.fingerprints import compare_fingerprints

    if profile.costs.n_layers != settings.n_layers:
        raise ValueError(
            f"the profile is of model '{profile.model}' with {profile.costs.n_layers} layers, the traces are of "
            f"'{settings.model}' with {settings.n_layers}: measure that one with `lede profile`"
        )
    shown = _Shown(settings.n_layers, settings.vocab_size, settings.model)
    tokenizer = settings.fingerprint.get("tokenizer") if settings.fingerprint else None
    prints = {"profile": profile.fingerprint}
    for each in found:
        if each.policy is None:
            continue
        each.policy.check_model(cast("EarlyExitModel", shown))
        if each.policy.memory is not None:
            each.policy.memory.check_tokenizer(tokenizer, settings.vocab_size, f"the traces' model '{settings.model}'")
        each.policy.check_temperature(settings.temperature)
        features = each.policy.features
        if features is not None and "confidence" in features.names and features.top_k != settings.features.top_k:
            raise ValueError(
                f"policy {each.text} looks at `confidence` with top_k {features.top_k}, the traces hold it with "
                f"{settings.features.top_k}: collect traces with that top_k"
            )
        if each.policy.fingerprint is not None:
            prints[f"policy {each.text}"] = each.policy.fingerprint
    for whose, recorded in prints.items():
        differences = compare_fingerprints(settings.fingerprint, recorded) if settings.fingerprint else []
        if differences:
            raise ValueError(
                f"the {whose} belongs to model '{recorded['name']}', the traces to '{settings.model}': "
                f"{'; '.join(differences)} (traces first)"
            )


@dataclass(frozen=True)
class _Shown:
    """As much of a model as a policy looks at when it is checked."""

    n_layers: int
    vocab_size: int
    name: str
    tokenizer: None = None  # traces know its digest alone

    def check_exit_layer(self, layer: int) -> None:
        """Raise ValueError unless a draft can leave after `layer` layers."""
        if not 1 <= layer < self.n_layers:
            raise ValueError(f"exit layer {layer} is outside 1..{self.n_layers - 1} of the traces' model")

    def check_sublayers(self) -> None:
        """Nothing runs here: drafts with gaps are refused by the simulator, which says why."""
