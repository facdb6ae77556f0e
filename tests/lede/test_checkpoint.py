"""A policy on disk: the same decisions after a round trip, and a plain word about every kind of damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from huggingface_hub import ModelCard

import lede.checkpoint
from lede.atomic import write_atomically
from lede.checkpoint import load_policy, push_to_hub, save_policy
from lede.cost_model import Measurement
from lede.cost_profile import CostProfile
from lede.features import FeatureConfig
from lede.policies import (
    LayerState,
    LearnedPolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
    ThresholdPolicy,
)
from tests.planted_costs import planted_model
from tests.tiny_models import tiny_model

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
FILES = {"config.json", "model.safetensors", "README.md"}


def learned(seed: int = 3, n_outputs: int = 2, **settings: Any) -> LearnedPolicy:
    rng, n = np.random.default_rng(seed), n_outputs
    layers = [(rng.normal(size=(16, 4)), rng.normal(size=16)), (rng.normal(size=(n, 16)), rng.normal(size=n))]
    return LearnedPolicy.from_network(layers, mean=np.ones(4), std=np.full(4, 2.0), **settings)


def observations(n: int = 1000) -> np.typing.NDArray[np.float32]:
    return np.random.default_rng(9).normal(1.0, 2.0, size=(n, 4)).astype(np.float32)


def decide(policy: Policy) -> list[bool]:
    decisions = [policy.scan(LayerState(2, 0, row)) for row in observations()]
    assert 0.05 < np.mean(decisions) < 0.95  # or equal decisions would say little
    return decisions


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "REMOVED"}))


@pytest.mark.parametrize(
    "policy",
    [
        StaticPolicy(exit_layer=3, draft_length=2),
        ThresholdPolicy(measure="entropy", thresholds=(1.0, 2.0), candidates=(1, 4)),
        ThresholdPolicy(thresholds=0.25),
        RandomPolicy(seed=5, trained_temperature=0.8),
        learned(candidates=(2, 3), features=FeatureConfig(names=("depth", "trace", "confidence", "entropy"), window=3)),
        learned(
            n_outputs=5,
            candidates=(2, 3, 5),
            features=FeatureConfig(("agreement", "survival", "in_scan", "in_draft"), draft_agreement=True),
        ),
    ],
    ids=["static", "thresholds", "threshold", "random", "learned", "learned with plans"],
)
def test_settings_survive_a_round_trip(policy: Policy, tmp_path: Path) -> None:
    policy.save_pretrained(str(tmp_path / "policy"))
    assert {path.name for path in (tmp_path / "policy").iterdir()} == FILES
    loaded = type(policy).from_pretrained(str(tmp_path / "policy"))
    assert loaded.config == policy.config
    assert not loaded.bound
    for name, tensor in policy.tensors().items():
        np.testing.assert_array_equal(loaded.tensors()[name], tensor)


def cost_profile(device_name: str) -> CostProfile:
    return CostProfile(
        model="demo", fingerprint={}, candidates=(2,), contexts=(8,), repeats=1, device="cpu", device_name=device_name,
        threads=1, dtype="float32", attention="sdpa", versions={}, costs=planted_model(), residuals={"all": 0.01},
        measurements=(Measurement("head", 0, 0, 1, 0, 1e-3, 1e-3, 1e-3),),
    )  # fmt: skip


def test_a_cost_profile_travels_with_the_policy(tmp_path: Path) -> None:
    policy = learned()
    policy.profile = cost_profile("a fast chip")
    save_policy(policy, tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {*FILES, "profile.json"}
    assert "seconds measured on cpu (a fast chip) in float32" in (tmp_path / "a" / "README.md").read_text()
    loaded = load_policy(tmp_path / "a")
    save_policy(loaded, tmp_path / "b")  # though nobody had looked at it
    assert load_policy(tmp_path / "b").profile == loaded.profile == policy.profile
    save_policy(learned(), tmp_path / "a")
    assert load_policy(tmp_path / "a").profile is None  # the file left by the first save is not this policy's


def test_a_profile_is_read_when_asked_for(tmp_path: Path) -> None:
    policy = learned()
    policy.profile = cost_profile("a")
    save_policy(policy, tmp_path)
    other = learned()
    other.profile = cost_profile("b")
    save_policy(other, tmp_path / "other")
    (tmp_path / "profile.json").write_bytes((tmp_path / "other" / "profile.json").read_bytes())
    loaded = load_policy(tmp_path)
    assert decide(loaded) == decide(policy)
    with pytest.raises(ValueError, match=r"profile\.json is not the file that config\.json was written with"):
        _ = loaded.profile
    (tmp_path / "profile.json").unlink()
    with pytest.raises(ValueError, match="cannot read the profile of the policy"):
        _ = load_policy(tmp_path).profile


def test_a_new_process_decides_alike_without_the_training_packages(tmp_path: Path) -> None:
    policy = learned()
    save_policy(policy, tmp_path)
    program = f"""
import json, sys
import numpy as np
import lede
from lede.policies import LayerState
policy = lede.load_policy({str(tmp_path)!r})
rows = np.array(json.loads(sys.stdin.read()), dtype=np.float32)
decisions = [policy.scan(LayerState(2, 0, row)) for row in rows]
model = lede.load_model("demo")
plain, out = (lede.generate(model, "def f(x):", policy=p, max_new_tokens=6) for p in (None, policy))
assert out.sequences.tolist() == plain.sequences.tolist()
heavy = sorted(set(sys.modules) & {{"d3rlpy", "zarr", "gymnasium", "gym"}})
print(json.dumps([decisions, heavy]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(observations().tolist()),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decisions, heavy = json.loads(done.stdout.splitlines()[-1])
    assert decisions == decide(policy)
    assert heavy == []


def test_a_bound_policy_comes_back_bound(tmp_path: Path) -> None:
    model = tiny_model("llama")
    policy = learned(trained_temperature=0.0).bind(model)
    save_policy(policy, tmp_path)
    loaded = load_policy(tmp_path, model)
    assert loaded.fingerprint == policy.fingerprint
    assert loaded.config.candidates == (1, 2, 3)
    assert loaded.config.trained_temperature == 0.0
    assert decide(loaded) == decide(policy)
    with pytest.raises(ValueError, match="belongs to model 'LlamaForCausalLM', not to 'GPT2LMHeadModel': model_type"):
        load_policy(tmp_path, tiny_model("gpt2"))


def test_an_unbound_policy_loads_where_its_layers_fit(tmp_path: Path) -> None:
    save_policy(StaticPolicy(exit_layer=5), tmp_path / "fits")
    for family in ("llama", "gpt2"):
        assert load_policy(tmp_path / "fits", tiny_model(family)).fingerprint is None
    save_policy(StaticPolicy(exit_layer=6), tmp_path / "does-not")
    with pytest.raises(ValueError, match=r"exit layer 6 is outside 1..5"):
        load_policy(tmp_path / "does-not", tiny_model("llama"))


def test_another_kind_is_refused_by_from_pretrained(tmp_path: Path) -> None:
    save_policy(RandomPolicy(), tmp_path)
    with pytest.raises(ValueError, match="holds a 'random' policy, not 'learned'"):
        LearnedPolicy.from_pretrained(str(tmp_path))


def cut(folder: Path, name: str, n_bytes: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:n_bytes])


def swap_weights(folder: Path, tensors: dict[str, Any]) -> None:
    """Put other weights in, with the digest to match."""
    import hashlib

    content = safetensors.numpy.save(tensors)
    (folder / "model.safetensors").write_bytes(content)
    edit(folder, weights_sha256=hashlib.sha256(content).hexdigest())


DAMAGE: dict[str, tuple[Any, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no policy: config.json is missing"),
    "cut config": (lambda f: cut(f, "config.json", 100), "is damaged: cannot read config.json"),
    "binary config": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "is damaged: cannot read config.json",
    ),
    "list config": (lambda f: (f / "config.json").write_text("[]"), "config.json holds no object"),
    "foreign config": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "holds no lede policy"),
    "newer format": (lambda f: edit(f, format=9), "holds a 'learned' policy in format 9, written by lede "),
    "unknown kind": (lambda f: edit(f, kind="oracle"), "holds a 'oracle' policy in format 1"),
    "key removed": (lambda f: edit(f, base_model="REMOVED"), "config.json lacks 'base_model'"),
    "settings of another kind": (lambda f: edit(f, config={"exit_layer": 3}), "there is no setting 'exit_layer'"),
    "settings of a wrong type": (
        lambda f: edit(f, config={"max_draft": "12"}),
        "setting 'max_draft' must be a whole number, got '12'",
    ),
    "settings are a text": (lambda f: edit(f, config="x"), "is damaged: "),
    "fingerprint cut": (lambda f: edit(f, base_model={"name": "m"}), "config.json lacks 'architecture'"),
    "fingerprint without layers": (
        lambda f: edit(
            f, base_model={"name": "m", "architecture": {}, "logits": [], "dtype": "float32", "tokenizer": None}
        ),
        "config.json lacks 'n_layers'",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "cut weights": (lambda f: cut(f, "model.safetensors", 200), "model.safetensors is not the file that config.json"),
    "no safetensors": (lambda f: edit_weights_as_text(f), "is damaged: Error while deserializing"),
    "other tensors": (lambda f: swap_weights(f, {"w": np.zeros(2)}), r"tensors must be layers.0.weight"),
    "other shape": (
        lambda f: swap_weights(f, {"layers.0.weight": np.zeros((2, 3)), "layers.0.bias": np.zeros(2)}),
        "takes 3 features, the config names",
    ),
}


def edit_weights_as_text(folder: Path) -> None:
    import hashlib

    (folder / "model.safetensors").write_text("not a safetensors file")
    edit(folder, weights_sha256=hashlib.sha256(b"not a safetensors file").hexdigest())


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_in_one_line_that_names_the_folder(damage: str, tmp_path: Path) -> None:
    save_policy(learned(), tmp_path / "policy")
    do, message = DAMAGE[damage]
    do(tmp_path / "policy")
    with pytest.raises(ValueError, match=message) as caught:
        load_policy(tmp_path / "policy")
    assert str(tmp_path / "policy") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_without_tensors_takes_none(tmp_path: Path) -> None:
    save_policy(StaticPolicy(), tmp_path)
    swap_weights(tmp_path, {"layers.0.weight": np.zeros((2, 4))})
    with pytest.raises(ValueError, match=r"a static policy has no tensors, got layers.0.weight"):
        load_policy(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        load_policy(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write a policy to"):
        save_policy(StaticPolicy(), tmp_path / "file")


def test_the_folder_of_a_run_is_told_from_its_policy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"algo": "dqn"}')
    save_policy(StaticPolicy(), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"holds no lede policy.* has its policy in .*policy$"):
        load_policy(tmp_path)


def test_saving_needs_a_network_and_writes_nothing_without(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no network"):
        save_policy(LearnedPolicy(), tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize("survivors", [0, 1, 2])
def test_an_interrupted_save_never_mixes_two_policies(
    survivors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving a new policy over an old one dies before, between and after the first files."""
    old = learned(seed=1)
    save_policy(old, tmp_path / "over")
    (tmp_path / "over" / "notes.txt").write_text("mine")
    real = write_atomically
    written: list[str] = []

    def dying(path: Path, content: bytes) -> None:
        if len(written) == survivors:
            raise KeyboardInterrupt
        written.append(path.name)
        real(path, content)

    monkeypatch.setattr(lede.checkpoint, "write_atomically", dying)
    for folder in ("over", "fresh"):
        written.clear()
        with pytest.raises(KeyboardInterrupt):
            save_policy(learned(seed=2), tmp_path / folder)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        load_policy(tmp_path / "fresh")
    if survivors == 0:
        assert decide(load_policy(tmp_path / "over")) == decide(old)
    else:
        with pytest.raises(ValueError, match="is not the file that"):
            load_policy(tmp_path / "over")
    save_policy(learned(seed=2), tmp_path / "over")
    assert decide(load_policy(tmp_path / "over")) == decide(learned(seed=2)) != decide(old)
    assert {path.name for path in (tmp_path / "over").iterdir()} == FILES | {"notes.txt"}


def test_a_failing_disk_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lede.atomic.os.fsync", full)
    with pytest.raises(ValueError, match=r"cannot write a policy to .*No space left on device"):
        save_policy(learned(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_card_is_readable_by_the_hub(tmp_path: Path) -> None:
    policy = learned().bind(tiny_model("llama"))
    save_policy(policy, tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "lede"
    assert card.data.base_model == "LlamaForCausalLM"
    assert {"lede", "early-exit", "learned"} <= set(card.data.tags)
    names = '{"names": ["confidence", "entropy", "trace", "depth"], "top_k": 5, "window": 8, "draft_agreement": false}'
    assert f"| features | `{names}` |" in card.text
    save_policy(StaticPolicy(), tmp_path / "unbound")
    assert ModelCard.load(tmp_path / "unbound" / "README.md").data.base_model is None


def test_the_card_tells_no_local_path(tmp_path: Path) -> None:
    policy = StaticPolicy()
    policy.fingerprint = {"name": str(tmp_path)}
    save_policy(policy, tmp_path / "policy")
    text = (tmp_path / "policy" / "README.md").read_text()
    assert ModelCard(text).data.get("base_model") == tmp_path.name
    assert str(tmp_path) not in text


def test_pushing_uploads_the_saved_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Hub:
        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> None:
            calls.append((repo_id, private, exist_ok))

        def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> SimpleNamespace:
            calls.append((repo_id, decide(load_policy(folder_path)), commit_message))
            assert {path.name for path in Path(folder_path).iterdir()} == FILES
            return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert push_to_hub(learned(), "me/policy", private=True, token="t") == "https://hub/commit"
    assert calls == ["t", ("me/policy", True, True), ("me/policy", decide(learned()), "lede learned policy")]


def test_a_class_that_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    class Mine(StaticPolicy):
        kind = "mine"

    with pytest.raises(ValueError, match=r"Mine \(kind 'mine'\) could not be loaded again"):
        save_policy(Mine(), tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    lede.policies.POLICIES["mine"] = Mine
    try:
        save_policy(Mine(), tmp_path / "mine")
        assert isinstance(load_policy(tmp_path / "mine"), Mine)
    finally:
        del lede.policies.POLICIES["mine"]
