"""Who takes part in a benchmark: policies resolved and tuned on a suite's validation prompts, and kept for a resume.

What tuning found is saved in the benchmark's folder as any policy is, and every run, the first one included, decodes
with what it loads from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lede.bench_log import file_name
from lede.bench_runs import CONTROL, PLAIN, TRANSFORMERS, ContenderSetup
from lede.checkpoint import check_fingerprint, load_policy, save_policy
from lede.contenders import short_names
from lede.interleaving import Call, Contender, Decode, lede_contender
from lede.policies import LayerSkippingPolicy, Policy, parse_policy
from lede.rivals import Rival, is_rival, parse_rival, rival_contender

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.tuning import Tuned, Tuner

ALWAYS = (TRANSFORMERS, PLAIN, CONTROL)
"""Contenders of every benchmark."""

CANNOT_RUN = (ValueError, RuntimeError)
"""What a policy raises that does not fit the model, or for which there is too little memory."""

POLICIES_FOLDER = "policies"
"""Folder of the policies that decode, one folder each by suite and name."""


@dataclass(frozen=True)
class Entrant:
    """A contender that is ready to decode."""

    setup: ContenderSetup
    """What the benchmark's folder says of it."""
    contender: Contender
    """Decodes."""
    policy: Policy | None
    """Its policy; None for plain and external ones."""


def contender_names(texts: Sequence[str]) -> dict[str, str]:
    """Names of the policies of a command line, each once; those that are always there are left out.

    Raises:
        ValueError: One of them is neither a policy nor an external contender.
    """
    kept = [text for text in dict.fromkeys(texts) if text not in ALWAYS]
    for text in kept:
        if is_rival(text):
            parse_rival(text)
        else:
            parse_policy(text)
    return dict(zip(kept, short_names(kept, ALWAYS), strict=True))


def standing(suite: str) -> list[ContenderSetup]:
    """The contenders of every benchmark, on a suite."""
    return [
        ContenderSetup(suite, TRANSFORMERS, TRANSFORMERS, TRANSFORMERS, "external"),
        ContenderSetup(suite, PLAIN, PLAIN, PLAIN, "plain"),
        ContenderSetup(suite, CONTROL, PLAIN, PLAIN, "plain"),
    ]


@dataclass(frozen=True)
class Decoding:
    """How everybody decodes."""

    max_new_tokens: int
    """Budget of new tokens a prompt."""
    temperature: float
    """0 decodes greedily; above 0 samples."""
    seed: int
    """Seed of tuning and of the tokens drawn."""


def check_fit(model: EarlyExitModel, texts: Sequence[str]) -> None:
    """Raise ValueError when a policy that is not tuned can't run on the model; before anything is measured."""
    from lede.tuning import is_tuned

    for text in texts:
        if is_rival(text):
            parse_rival(text).check_model(model)
        elif not is_tuned(text):
            policy = parse_policy(text)
            if policy is not None:
                check_fingerprint(policy, model)
                policy.check_model(model)


def enter(tuner: Tuner, text: str, name: str, out: Path) -> ContenderSetup:
    """Tune a contender on the suite's validation prompts, if it is given by name alone, and save it.

    One that can't run, as where every setting fails, becomes a contender that failed: the others go on.

    Args:
        tuner: Of the suite.
        text: The policy as the command line gave it.
        name: What tables call it.
        out: Folder of the benchmark.
    """
    try:
        return register(tuner.tune(text), tuner, name, out)
    except CANNOT_RUN as error:
        return failed(tuner.suite, name, text, error)


def failed(suite: str, name: str, text: str, error: Exception) -> ContenderSetup:
    """A contender that can't run, and why."""
    message = " ".join(str(error).split()) or type(error).__name__
    return ContenderSetup(suite, name, text, text, "external" if is_rival(text) else "policy", failed=message)


def register(tuned: Tuned, tuner: Tuner, name: str, out: Path) -> ContenderSetup:
    """Save a contender that is ready for the tuner's suite."""
    suite, policy = tuner.suite, tuned.policy
    if policy is None:
        return ContenderSetup(suite, name, tuned.as_given, tuned.settings, "external", cost=tuned.cost)
    save_policy(policy, policy_folder(out, suite, name))
    policy.check_model(tuner.model)  # makes a search ready, where there is one
    online = policy.searches if isinstance(policy, LayerSkippingPolicy) else type(policy).state is not Policy.state
    return ContenderSetup(suite, name, tuned.as_given, tuned.settings, "policy", online=online, cost=tuned.cost)


def entrant(model: EarlyExitModel, setup: ContenderSetup, decoding: Decoding, out: Path) -> Entrant:
    """A contender as the benchmark's folder has it.

    Raises:
        ValueError: Its saved policy is damaged or belongs to another model.
    """
    budget, temperature = decoding.max_new_tokens, decoding.temperature
    if setup.failed is not None:
        return Entrant(setup, Contender(setup.name, _failing(setup.failed)), None)
    if setup.kind == "external":
        rival: Rival = parse_rival(setup.settings)
        return Entrant(setup, rival_contender(model, rival, budget, temperature, setup.name), None)
    policy = None
    if setup.kind == "policy":
        policy = load_policy(policy_folder(out, setup.suite, setup.name))
        check_fingerprint(policy, model)
    return Entrant(setup, lede_contender(model, setup.name, policy, budget, temperature), policy)


def policy_folder(out: Path, suite: str, name: str) -> Path:
    """Where a contender's policy is kept."""
    return out / POLICIES_FOLDER / file_name(suite, name)


def _failing(message: str) -> Callable[[Call], Decode]:
    def decode(call: Call) -> Decode:
        raise RuntimeError(message)

    return decode
