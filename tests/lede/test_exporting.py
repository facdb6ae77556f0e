"""Policies as ONNX: the decisions of the policy itself, what the file says about itself, and what is refused."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import lede
from lede.acceptance import DRAFTING, SCANNING, AcceptanceModel, inputs
from lede.cli import main
from lede.features import FEATURES, FeatureConfig
from lede.policies import LearnedPolicy, Policy, SurvivalPolicy
from lede.policies.base import LayerState, PreScanState

onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

CANDIDATES = (2, 4, 8)
STAGES = ("entropy", "trace", "depth", "in_scan", "in_draft")
EVERYTHING = FeatureConfig(tuple(FEATURES))
Array = npt.NDArray[np.float32]


def observations(features: FeatureConfig, seed: int = 5) -> Array:
    """1,000 raw observations."""
    low, high = features.bounds(16, 4096)
    return (low + np.random.default_rng(seed).random((1000, low.size)) * (high - low)).astype(np.float32)


def network(features: FeatureConfig, *sizes: int) -> LearnedPolicy:
    """A policy on normalised observations that takes each of its actions somewhere."""
    rng = np.random.default_rng(sum(sizes))
    shapes = pairwise([len(features.names), *sizes])
    layers = [(rng.normal(size=(b, a)) / np.sqrt(a), rng.normal(size=b) / 4) for a, b in shapes]
    low, high = features.bounds(16, 4096)
    settings: dict[str, Any] = {"features": features, "mean": (low + high) / 2, "std": (high - low) / 3}
    if sizes[-1] > 2:
        settings["candidates"] = CANDIDATES
    values = LearnedPolicy.from_network(layers, **settings).q_values(observations(features))
    layers[-1] = (layers[-1][0], layers[-1][1] - values.mean(axis=0))
    return LearnedPolicy.from_network(layers, **{**settings, "candidates": CANDIDATES})


def survival() -> SurvivalPolicy:
    seen = inputs(observations(EVERYTHING), EVERYTHING)
    weights = np.random.default_rng(0).normal(size=(2, len(CANDIDATES), seen.shape[1])) / 10
    weights[..., -1] -= weights @ seen.mean(axis=0)
    model = AcceptanceModel(EVERYTHING, weights, np.array([0.5, 1.0, 1.5]))
    return SurvivalPolicy.from_model(model, candidates=CANDIDATES, thresholds=(0.3, 0.5, 0.8))


MAKERS: dict[str, Callable[[], LearnedPolicy | SurvivalPolicy]] = {
    "learned": lambda: network(FeatureConfig(), 64, 64, 2),
    "with-plans": lambda: network(FeatureConfig(STAGES), 16, 2 + len(CANDIDATES)),
    "survival": survival,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder NAME for each policy and its file NAME.onnx, written by the command line."""
    out = tmp_path_factory.mktemp("exported")
    for name, make in MAKERS.items():
        make().save_pretrained(str(out / name))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the filters of the test run don't reach module fixtures
            assert main(["export", "--policy", str(out / name), "--onnx", str(out / f"{name}.onnx")]) == 0
    return out


def run(folders: Path, name: str, seen: Array, batch: int) -> npt.NDArray[Any]:
    session = onnxruntime.InferenceSession(str(folders / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    parts = [seen[start : start + batch] for start in range(0, len(seen), batch)]
    return np.concatenate([session.run(None, {"observations": part})[0] for part in parts])


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("name", ["learned", "with-plans"])
def test_the_largest_value_is_that_of_the_policy(folders: Path, name: str, batch: int) -> None:
    policy = lede.load_policy(folders / name)
    assert isinstance(policy, LearnedPolicy)
    seen = observations(policy.features)
    found = run(folders, name, seen, batch)
    assert found.shape == (1000, policy.network.n_outputs)
    assert found.dtype == np.float32
    taken = found.argmax(axis=1)
    assert taken.tolist() == [policy.network.best(row) for row in seen]
    exits = found[:, 1] > found[:, 0]
    assert exits.tolist() == [policy.scan(LayerState(2, 0, row)) for row in seen]
    assert 0.05 < exits.mean() < 0.95  # or nothing was shown
    assert len(set(taken.tolist())) == policy.network.n_outputs


@pytest.mark.parametrize("batch", [1, 7])
def test_forecasts_are_those_of_the_policy(folders: Path, batch: int) -> None:
    policy = lede.load_policy(folders / "survival")
    assert isinstance(policy, SurvivalPolicy)
    seen = observations(policy.features)
    found = run(folders, "survival", seen, batch)
    assert found.shape == (1000, 2, len(CANDIDATES))
    for place, layer in enumerate(CANDIDATES):
        for stage in (SCANNING, DRAFTING):
            wanted = policy.model.log_odds(seen, np.full(1000, stage == DRAFTING), np.full(1000, place))
            np.testing.assert_allclose(found[:, stage, place], wanted, rtol=1e-9, atol=1e-9)
        limit = policy.limits[place]
        exits = found[:, SCANNING, place] >= np.log(limit / (1 - limit))
        policy.pre_scan(PreScanState(1.0, None, 0, 10, 10))
        assert exits.tolist() == [policy.scan(LayerState(layer, 0, row)) for row in seen]
        assert 0.05 < exits.mean() < 0.95


@pytest.mark.parametrize("name", MAKERS)
def test_the_file_says_what_it_takes_and_gives(folders: Path, name: str) -> None:
    policy = lede.load_policy(folders / name)
    session = onnxruntime.InferenceSession(str(folders / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    (given,), (returned,) = session.get_inputs(), session.get_outputs()
    assert policy.features is not None
    assert (given.name, given.type, given.shape) == (
        "observations",
        "tensor(float)",
        ["batch", len(policy.features.names)],
    )
    assert returned.shape[0] == "batch"
    facts = session.get_modelmeta().custom_metadata_map
    assert facts["library"] == "lede"
    assert facts["lede_version"] == lede.__version__
    assert facts["kind"] == policy.kind
    assert json.loads(facts["features"]) == list(policy.features.names)
    assert json.loads(facts["candidates"]) == list(CANDIDATES)
    assert facts["output"].startswith(f"{returned.name} (batch, ")
    assert json.loads(facts["config"])["features"]["window"] == 8
    assert ("BLIND 4" in facts["output"]) == (name == "with-plans")
    assert ("blind" in facts) == (name == "survival")


@pytest.mark.parametrize("name", MAKERS)
def test_the_file_tells_nothing_of_where_it_was_made(folders: Path, name: str) -> None:
    content = (folders / f"{name}.onnx").read_bytes()
    assert str(Path(lede.__file__).parent).encode() not in content
    assert b"stack_trace" not in content
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)


def test_exported_twice_it_is_the_same_file(folders: Path) -> None:
    from lede.exporting import to_onnx

    assert to_onnx(lede.load_policy(folders / "learned")) == (folders / "learned.onnx").read_bytes()


def test_the_exporters_own_remarks_are_not_passed_on(
    folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    out = tmp_path / "new" / "policy.onnx"
    assert main(["export", "--policy", str(folders / "learned"), "--onnx", str(out)]) == 0
    told = capfd.readouterr()
    assert told.err == ""
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert registration.level == level
    assert told.out.splitlines() == [
        "observations (batch, 4): confidence, entropy, trace, depth",
        "q_values (batch, action), actions CONTINUE, EXIT",
        f"equal to the policy on 1000 observations; written to {out}",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["policy.onnx"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("plain", "a 'plain' policy has no network to export; learned and survival ones have"),
        ("static", "a 'static' policy has no network"),
        ("threshold", "a 'threshold' policy has no network"),
        ("swift", "a 'swift' policy has no network"),
        ("ablated:base={folders}/learned;draft_length=2", "export the policy that it ablates"),
        ("learned", "give the folder that it was saved to"),
        ("nothing/here", "'nothing/here' is neither a folder nor one of"),
    ],
)
def test_policies_without_a_network_are_refused_by_name(
    policy: str, message: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "policy.onnx"
    assert main(["export", "--policy", policy.format(folders=folders), "--onnx", str(out)]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--policy", str(folders / "learned"), "--onnx", str(tmp_path)]) == 2
    assert "is a folder; give a file as --onnx" in capsys.readouterr().err


def test_a_file_in_the_way_of_the_folder_is_told(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", "--policy", str(folders / "learned"), "--onnx", str(tmp_path / "file" / "x.onnx")]) == 2
    assert "cannot write" in capsys.readouterr().err


class Negated:
    """An ONNX runtime whose networks decide the other way around."""

    def __init__(self, real: Any, factor: float) -> None:
        self._real, self._factor = real, factor

    def run(self, *arguments: Any) -> list[Any]:
        return [self._factor * output for output in self._real.run(*arguments)]


@pytest.mark.parametrize("factor", [-1.0, 1.001])
def test_a_network_that_differs_is_not_written(
    factor: float, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *a, **k: Negated(real(*a, **k), factor))
    out = tmp_path / "policy.onnx"
    out.write_bytes(b"the old one")
    assert main(["export", "--policy", str(folders / "learned"), "--onnx", str(out)]) == 2
    assert "the exported network differs from the policy at batch 1" in capsys.readouterr().err
    assert out.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_the_extra_is_named_where_it_is_missing(
    package: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["export", "--policy", str(folders / "learned"), "--onnx", str(tmp_path / "x.onnx")]) == 2
    assert f"needs the package {package}: pip install 'lede-rl[onnx]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_plain_and_custom_policies_are_refused_in_python_too() -> None:
    from lede.policy_network import policy_network

    class Own(Policy):
        kind = "own"

        def scan(self, state: LayerState) -> bool:
            return True

        draft = scan

    for policy, kind in ((None, "plain"), (Own(), "own")):
        with pytest.raises(ValueError, match=f"a '{kind}' policy has no network to export"):
            policy_network(policy)
