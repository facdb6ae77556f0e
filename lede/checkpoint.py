"""A frozen policy on disk: config.json, model.safetensors and a model card. Never pickle.

config.json names the policy's kind, its settings, the fingerprint of its base model (null while unbound) and the digest
of the weights beside it, so that a folder whose parts come from two saves is noticed. A policy that was fitted to
seconds has the cost profile beside it in profile.json, which is read when somebody asks for it; one that remembers
other texts has them in memory.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import weakref
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.numpy
from safetensors import SafetensorError

import lede
from lede.atomic import write_atomically
from lede.fingerprints import compare_fingerprints, fingerprint
from lede.phrases import PhraseMemory
from lede.policies import POLICIES, Policy
from lede.policies.settings import settings_from_json

if TYPE_CHECKING:
    from lede.cost_profile import CostProfile
    from lede.models import EarlyExitModel

__all__ = [
    "check_fingerprint",
    "compare_fingerprints",
    "fingerprint",
    "load_policy",
    "push_to_hub",
    "save_policy",
    "versions",
]

CONFIG, WEIGHTS, CARD, PROFILE = "config.json", "model.safetensors", "README.md", "profile.json"
MEMORY = "memory.safetensors"
FORMAT = 1
"""Version of the folder's layout; raised when an older lede can't read what a newer one writes."""

_checked: weakref.WeakKeyDictionary[Policy, tuple[weakref.ref[EarlyExitModel], dict[str, Any]]]
_checked = weakref.WeakKeyDictionary()  # the model that a policy was last found to fit: a check costs a forward pass


def check_fingerprint(policy: Policy, model: EarlyExitModel) -> None:
    """Raise ValueError when a bound policy belongs to another model; unbound policies pass.

    A policy and a model that fit once are not compared again, so weights changed in place go unnoticed.
    """
    if policy.fingerprint is None:
        return
    last = _checked.get(policy)
    if last is not None and last[0]() is model and last[1] is policy.fingerprint:
        return
    differences = compare_fingerprints(policy.fingerprint, fingerprint(model))
    if differences:
        raise ValueError(
            f"this {policy.kind} policy belongs to model '{policy.fingerprint['name']}', not to '{model.name}': "
            f"{'; '.join(differences)} (policy's first). Load its own model, or train a policy for this one"
        )
    _checked[policy] = weakref.ref(model), policy.fingerprint


def versions() -> dict[str, str]:
    """Versions of lede and of the packages that decoding depends on."""
    found = {"lede": lede.__version__}
    for package in ("torch", "transformers", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def save_policy(policy: Policy, folder: str | Path) -> None:
    """Write a policy to a folder, which is made if needed; other files in it stay.

    Each file is replaced whole, config.json last: an interrupted save leaves a folder that loads the old policy, or is
    refused.

    Raises:
        ValueError: The folder can't be written, the policy's class is not one that `load_policy` knows, or the profile
            that it came with can't be read.
    """
    if POLICIES.get(policy.kind) is not type(policy):
        raise ValueError(
            f"{type(policy).__name__} (kind '{policy.kind}') could not be loaded again; policies that are saved are "
            f"{', '.join(POLICIES)}. Keep the class in your code, or add it to lede.policies.POLICIES"
        )
    weights = safetensors.numpy.save(policy.tensors(), metadata={"format": "lede"})
    profile = None if policy.profile is None else (json.dumps(policy.profile.to_json(), indent=1) + "\n").encode()
    memory = None if policy.memory is None else policy.memory.to_bytes()
    config = {
        "library": "lede",
        "format": FORMAT,
        "kind": policy.kind,
        "config": _settings(policy),
        "base_model": policy.fingerprint,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "profile_sha256": None if profile is None else hashlib.sha256(profile).hexdigest(),
        "memory_sha256": None if memory is None else hashlib.sha256(memory).hexdigest(),
        "versions": versions(),
    }
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_atomically(target / WEIGHTS, weights)
        if profile is not None:
            write_atomically(target / PROFILE, profile)
        if memory is not None:
            write_atomically(target / MEMORY, memory)
        write_atomically(target / CARD, _card(policy).encode())
        write_atomically(target / CONFIG, (json.dumps(config, indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ValueError(f"cannot write a policy to {folder}: {error}") from error


def load_policy(folder: str | Path, model: EarlyExitModel | None = None) -> Policy:
    """Load a policy from a folder that `save_policy` wrote.

    Args:
        folder: The folder.
        model: The model that it shall run on, checked at once; `lede.generate` checks again by itself.

    Raises:
        ValueError: The folder holds no policy or a damaged one, or the policy can't run on the model.
    """
    config = _read_config(Path(folder))
    kind = config.get("kind")
    if config.get("library") != "lede":
        nested = Path(folder) / "policy"
        hint = f"; the run that it holds has its policy in {nested}" if (nested / CONFIG).is_file() else ""
        raise ValueError(f"{folder} holds no lede policy: its {CONFIG} does not say library lede{hint}")
    if config.get("format") != FORMAT or kind not in POLICIES:
        written_by = dict(config.get("versions") or {}).get("lede", "an unknown version")
        raise ValueError(
            f"{folder} holds a '{kind}' policy in format {config.get('format')}, written by lede {written_by}; lede "
            f"{lede.__version__} reads format {FORMAT} and {', '.join(POLICIES)}"
        )
    try:
        policy_class = POLICIES[kind]
        policy = policy_class(settings_from_json(policy_class.config_class, dict(config["config"])))
        policy.fingerprint = _read_fingerprint(config["base_model"])
        policy.load_tensors(dict(safetensors.numpy.load(_read_part(Path(folder), WEIGHTS, config["weights_sha256"]))))
        if config.get("profile_sha256") is not None:
            policy.profile = partial(_read_profile, Path(folder), str(config["profile_sha256"]))
        if config.get("memory_sha256") is not None:
            content = _read_part(Path(folder), MEMORY, config["memory_sha256"])
            policy.memory = PhraseMemory.from_bytes(content, MEMORY)
    except KeyError as error:
        raise ValueError(f"the policy in {folder} is damaged: {CONFIG} lacks {error}") from None
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"the policy in {folder} is damaged: {' '.join(str(error).split())}") from error
    if model is not None:
        check_fingerprint(policy, model)
        policy.check_model(model)
    return policy


def push_to_hub(policy: Policy, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Upload a policy to a repository of the Hugging Face hub, which is made if needed.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import HfApi

    hub = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_policy(policy, folder)
        hub.create_repo(repo_id, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"lede {policy.kind} policy")
    return str(commit.commit_url)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} to load a policy from")
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no policy: {CONFIG} is missing")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"the policy in {folder} is damaged: cannot read {CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"the policy in {folder} is damaged: {CONFIG} holds no object")
    return config


def _read_fingerprint(recorded: Any) -> dict[str, Any] | None:
    if recorded is None:
        return None
    print_of = dict(recorded)
    for key, kind in (("name", str), ("architecture", dict), ("logits", list), ("dtype", str)):
        if not isinstance(print_of[key], kind):
            raise ValueError(f"base_model's {key} is no {kind.__name__}")
    if not all(isinstance(value, float) for value in print_of["logits"]):
        raise ValueError("base_model's logits are no numbers")
    _ = print_of["tokenizer"], print_of["architecture"]["n_layers"]  # may be null, but must be there
    return print_of


def _read_part(folder: Path, name: str, digest: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{name} is missing")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{name} is not the file that {CONFIG} was written with; save the policy again")
    return content


def _read_profile(folder: Path, digest: str) -> CostProfile:
    """The cost profile in a policy's folder.

    Raises:
        ValueError: It is missing, damaged, or not the one that the policy was saved with.
    """
    from lede.cost_profile import CostProfile

    path = folder / PROFILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the profile of the policy in {folder}: {error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{path} is not the file that {CONFIG} was written with; save the policy again")
    return CostProfile.load(path)


def _settings(policy: Policy) -> dict[str, Any]:
    """A policy's settings as JSON values; a memory is in the folder, wherever it was read from."""
    config = asdict(policy.config)
    return {**config, "memory": None} if "memory" in config else config


def _card(policy: Policy) -> str:
    """The model card: YAML front matter as the hub reads it, then what a reader wants to know."""
    name = policy.fingerprint["name"] if policy.fingerprint is not None else None
    if name is not None and Path(name).exists():
        name = Path(name).resolve().name  # a local path says nothing elsewhere
    tags = ["lede", "early-exit", "self-speculative-decoding", policy.kind]
    front = ["library_name: lede", *([f"base_model: {json.dumps(name)}"] if name is not None else []), "tags:"]
    config = _settings(policy)
    if isinstance(config.get("features"), dict):
        config["features"].pop("forecast", None)  # coefficients are nothing to read
    settings = "\n".join(f"| {key} | `{json.dumps(value)}` |" for key, value in config.items())
    base = f"It belongs to the model {name}" if name is not None else "It runs on any model that its layers fit"
    beside = ""
    if policy.profile is not None:
        p = policy.profile
        beside = f" It was fitted to seconds measured on {p.device} ({p.device_name}) in {p.dtype}, see {PROFILE}."
    if policy.memory is not None:
        beside += (
            f" It remembers what followed the phrases of {policy.memory.texts.size} texts, in {MEMORY}: publish it as "
            "you would publish these."
        )
    return f"""---
{chr(10).join([*front, *(f"- {tag}" for tag in tags)])}
---
# A {policy.kind} policy for lede

It decides when a language model's layers draft tokens for the model itself, and how many. {base}. The text is the
plain model's whatever it decides.{beside}

```python
import lede

model = lede.load_model({json.dumps(name or "demo")})
policy = lede.load_policy("this-folder")
print(lede.generate(model, "def fib(n):", policy=policy, max_new_tokens=64).text)
```

| setting | value |
|---|---|
{settings}

Written by lede {lede.__version__}.
"""
