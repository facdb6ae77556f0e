"""benchmarks/gpu.sh: a dry run on a CPU, and what is said when something is missing, slow, or wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from benchmarks import gpu_measure, gpu_stages
from benchmarks.gpu_measure import COMPILED, compiled, contenders, copy_bandwidth, measure
from benchmarks.gpu_policies import PassSeconds, best_static, best_surprisal, plain_texts, stop_network, tune
from benchmarks.gpu_report import BUDGETS, Outcome, exit_code, main, render, run_stages
from benchmarks.gpu_shapes import TINY, tiny_llama
from benchmarks.gpu_stages import HAND_MADE, STAGES, Stage
from benchmarks.planted_model import planted_llama
from lede.interleaving import Call, Decode
from lede.models import EarlyExitModel, load_model
from lede.policies import ExitAt, PreScan, PreScanState, StaticPolicy
from lede.policies.base import LayerState

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def run(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = ("WHEELS", "SHAPES", "DEVICE", "STAGES", "COMPILE")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    variables = {**kept, "PYTHON": sys.executable, "OUT": str(out), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", str(SCRIPT)], env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    shape = tiny_llama()
    return load_model((planted_llama(shape.config, shape.plan), None))


def stage(folder: Path, name: str = "tiny") -> Stage:
    return Stage(name, torch.device("cpu"), TINY, folder, folder / "records.jsonl", False)


def records(folder: Path, kind: str) -> list[Any]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [entry["content"] for entry in map(json.loads, lines) if entry["kind"] == kind]


@pytest.mark.slow
def test_a_dry_run_ends_with_a_table(tmp_path: Path) -> None:
    # what the interpreter finds first hides packages from the stages, as on a machine that lacks them
    (tmp_path / "hidden").mkdir()
    hide = "import sys\nfor name in ('gymnasium', 'zarr', 'd3rlpy', 'pytest'):\n    sys.modules[name] = None\n"
    (tmp_path / "hidden" / "sitecustomize.py").write_text(hide)
    out = tmp_path / "out"
    done = run(out, SHAPES="tiny", DEVICE="cpu", COMPILE="0", PYTHONPATH=str(tmp_path / "hidden"))
    assert done.returncode == 0, done.stdout + done.stderr + (out / "log.txt").read_text()
    report = json.loads((out / "report.json").read_text())
    assert report["exit_code"] == 0
    assert report["device"] == "cpu"
    assert [entry["stage"] for entry in report["stages"]] == list(BUDGETS["tiny"])
    assert not [entry["error"] for entry in report["stages"] if entry["error"]]
    found = [entry for each in report["stages"] for entry in each["records"]]
    rows = [entry["content"] for entry in found if entry["kind"] == "row"]
    for name in ("bundled", "tiny"):
        own = [row for row in rows if row["model"] == name]
        policies = [(row["dtype"], row["engine"], row["policy"].split()[0]) for row in own]
        common = [("transformers", "plain"), ("eager", "plain"), ("eager", "static"), ("eager", "lede")]
        assert policies == [
            *(("bfloat16", *each) for each in common),
            *(("float32", *each) for each in common),
            ("float32", "eager", "random"),
        ]
        assert {row["policy"] for row in own} >= {HAND_MADE}
    assert {row["exact"] for row in rows} <= {"yes", "ties"}
    assert all(row["tokens_per_second"] > 0 for row in rows)
    skipped = {entry["content"] for entry in found if entry["kind"] == "skipped"}
    assert skipped == {
        "collecting, fitting and training: gymnasium and zarr not installed",
        "the compiled engine: not asked for",
        "tests/lede/test_gpu.py: pytest not installed",
    }
    checks = [entry["content"] for entry in found if entry["kind"] == "check"]
    assert len(checks) == 2 * 7 + 1
    assert all(check["ok"] for check in checks)
    text = (out / "report.md").read_text()
    assert text in done.stdout
    for words in ("| bundled | float32  | eager        | random", "planted margins", "exit code 0", "roofline"):
        assert words in text
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "report.json", "report.md"]


def test_both_kinds_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("gymnasium")
    from lede.buffers import open_store
    from lede.cost_profile import CostProfile
    from lede.demo import learning

    asked: list[str] = []
    monkeypatch.setattr(learning, "price", lambda *_: object.__new__(CostProfile))
    monkeypatch.setattr(CostProfile, "head_over_layer", lambda _: 0.5)
    monkeypatch.setattr(learning, "learn", lambda what, *_: asked.append(what))
    monkeypatch.setattr(gpu_stages, "lacking", lambda *packages: [name for name in packages if name == "d3rlpy"])
    gpu_stages.experience(stage(tmp_path, "experience"))
    assert [len(open_store(tmp_path / f"{name}.zarr").prompts) for name in ("traces", "rollouts")] == [4, 2]
    assert records(tmp_path, "note")[:2] == [
        "teacher: traces of 4 and 2 prompts collected",
        "rollout: the environment played on 2 prompts",
    ]
    assert asked == ["thresholds"]
    assert records(tmp_path, "skipped") == ["training a Q-network: d3rlpy not installed"]


@pytest.mark.slow
def test_policies_are_fitted_and_decoded(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("gymnasium")
    gpu_stages.experience(stage(tmp_path, "experience"))
    notes = records(tmp_path, "note")
    assert "thresholds fitted to seconds" in notes
    trained = not gpu_stages.lacking("d3rlpy")
    assert ("Q-network trained for seconds, 10 updates" in notes) == trained
    gpu_stages.bundled(stage(tmp_path, "bundled"))
    names = {row["policy"] for row in records(tmp_path, "row")}
    assert "lede (thresholds)" in names
    assert ("lede (Q-network)" in names) == trained
    assert HAND_MADE not in names


def test_a_stage_that_fails_or_is_slow_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = "import json; open({!r}, 'a').write(json.dumps({{'kind': 'note', 'content': 'began'}}) + '\\n{{\"cut')"
    ends = {"fine": "", "broken": "raise RuntimeError('no memory')", "slow": "import time; time.sleep(60)", "last": ""}

    def command(name: str, path: Path) -> list[str]:
        return [sys.executable, "-c", f"{write.format(str(path))}\n{ends[name]}"]

    budgets = {"fine": 20, "broken": 20, "slow": -37, "last": 60}
    outcomes = run_stages(budgets, command, tmp_path / "log.txt", tmp_path)
    errors = {outcome.stage: outcome.error for outcome in outcomes}
    assert errors["fine"] is None
    assert errors["broken"] == "exit code 1: RuntimeError: no memory"
    assert str(errors["slow"]).startswith("out of time after")
    assert errors["last"] is None
    assert [outcome.of_kind("note") for outcome in outcomes] == [["began"]] * 4
    assert exit_code(outcomes) == 3
    assert "broken: exit code 1: RuntimeError: no memory" in render(outcomes)
    assert "slow: out of time after" in capsys.readouterr().out


def test_exit_codes_by_what_was_found() -> None:
    def outcome(**found: Any) -> Outcome:
        return Outcome("s", 1.0, 2.0, records=[{"kind": kind, "content": what} for kind, what in found.items()])

    good = {"what": "text of x", "ok": True, "detail": "exact: yes"}
    assert exit_code([outcome(check=good)]) == 0
    assert exit_code([outcome(failure="static: OutOfMemoryError"), outcome(check=good)]) == 3
    bad = [outcome(failure="f"), outcome(check={**good, "ok": False, "detail": "exact: NO"})]
    assert exit_code(bad) == 1
    assert "- CHECK FAILED: text of x: exact: NO" in render(bad)


def test_a_wrong_text_and_a_failing_contender_are_recorded(
    tmp_path: Path, model: EarlyExitModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = contenders(model, {"plain": None, "static": StaticPolicy(exit_layer=2), "bad": None}, 6)

    def wrong(call: Call) -> Decode:
        done = asked[1].decode(call)
        return Decode((*done.token_ids[:-1], (done.token_ids[-1] + 1) % model.vocab_size), 0.1, 0.1)

    def failing(call: Call) -> Decode:
        raise RuntimeError("no kernel")

    found = [*asked[:2], type(asked[2])("static", failing), type(asked[3])("bad", wrong)]
    gpu_stages._measure(stage(tmp_path), model, found, [[1, 2, 3], [4, 5, 6]])
    assert records(tmp_path, "failure") == ["float32: static: RuntimeError: no kernel"]
    verdicts = {check["what"]: check["ok"] for check in records(tmp_path, "check")}
    assert verdicts == {"text of float32, eager, plain": True, "text of float32, eager, bad": False}
    assert [row["policy"] for row in records(tmp_path, "row")] == ["plain", "plain", "bad"]


def test_the_compiled_engine_is_timed_where_there_is_one(
    model: EarlyExitModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(pair: tuple[Any, Any], compile: bool = False) -> EarlyExitModel:
        engine = EarlyExitModel(*pair)
        engine.compile_seconds = 1.5 if compile else 0.0
        return engine

    def falls_back(pair: tuple[Any, Any], compile: bool = False) -> EarlyExitModel:
        warnings.warn("run eagerly: no C++ compiler", stacklevel=2)
        return EarlyExitModel(*pair)

    def knows_nothing(pair: tuple[Any, Any]) -> EarlyExitModel:
        return EarlyExitModel(*pair)

    monkeypatch.setattr(gpu_measure, "load_model", knows_nothing)
    assert compiled(model) == (None, "compile not available in this version of lede")
    monkeypatch.setattr(gpu_measure, "load_model", falls_back)
    assert compiled(model) == (None, "run eagerly: no C++ compiler")
    monkeypatch.setattr(gpu_measure, "load_model", load)
    fast, how = compiled(model)
    assert how == "compiled in 1.5 s"
    assert fast is not None
    found = contenders(model, {"plain": None, "static": StaticPolicy(exit_layer=2)}, 8, fast)
    assert [each.name for each in found[3:]] == ["plain" + COMPILED, "static" + COMPILED]
    rows = measure(model, found, [[1, 2, 3]], {"model": "m", "dtype": "float32"}).rows
    by_name = {(row["engine"], row["policy"]): row for row in rows}
    assert by_name["compiled", "plain"]["over_plain"] == pytest.approx(1.0)
    assert by_name["eager", "plain"]["over_plain"] == pytest.approx(1.0)
    assert by_name["transformers", "plain"]["over_plain"] is None
    assert {row["exact"] for row in rows} == {"yes"}


def test_stages_time_what_is_compiled_or_say_why_nothing_is(
    tmp_path: Path, model: EarlyExitModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_stages, "compiled", lambda _: (None, "run eagerly: no C++ compiler"))
    asked = Stage("tiny", torch.device("cpu"), TINY, tmp_path, tmp_path / "records.jsonl", compile=True)
    texts = plain_texts(model, [[1, 2, 3]], 8)
    gpu_stages._decode(asked, model, lambda dtype: None, [[4, 5, 6]], tune(model, texts), {})
    assert records(tmp_path, "skipped") == ["the compiled engine: run eagerly: no C++ compiler"]
    before = len(records(tmp_path, "row"))
    engine = EarlyExitModel(model.hf_model)
    monkeypatch.setattr(gpu_stages, "compiled", lambda _: (engine, "compiled in 1.5 s"))
    gpu_stages._decode(asked, model, lambda dtype: None, [[4, 5, 6]], tune(model, texts), {})
    engines = [row["engine"] for row in records(tmp_path, "row")[before:]]
    assert engines == ["transformers", "eager", "eager", "compiled", "compiled"]
    notes = records(tmp_path, "note")
    assert "layers compiled in 1.5 s" in notes
    assert [note for note in notes if note.startswith("plain, compiled: ")]


def test_arithmetic_finds_the_best_static_setting() -> None:
    seconds = PassSeconds(layer=1.0, verified_layer=1.0, head=1.0, n_layers=8)
    assert seconds.plain == 9
    assert seconds.round(2, 3) == 4 * 2 + 3 + 6 + 1
    layer, length, speedup = best_static([0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0], seconds)
    assert layer == 2
    tokens = sum(0.9**i for i in range(length + 1))
    assert speedup == pytest.approx(tokens * 9 / seconds.round(2, length))
    assert speedup > max(sum(0.9**i for i in range(n + 1)) * 9 / seconds.round(2, n) for n in (length - 1, length + 1))
    assert best_static([0.0] * 8, seconds)[2] < 1


def test_the_surprisal_to_stop_at() -> None:
    surprisals, matches = [0.1, 2.0, 0.3, 1.0, 0.2], [True, False, True, False, True]
    assert best_surprisal(surprisals, matches, 0.5) == pytest.approx(0.65)
    assert best_surprisal([0.1, 0.2], [False, False], 0.5) == 0
    assert best_surprisal([0.1, 0.2], [True, True], 0.5) == pytest.approx(1.2)
    assert best_surprisal([], [], 0.5) == 0


def test_the_hand_made_network_drafts_blind_and_stops_when_surprised() -> None:
    def before(**_: Any) -> PreScanState:
        return PreScanState(0.0, None, 0, 10, 10, np.zeros(3, dtype=np.float32))

    def drafting(surprisal: float) -> LayerState:
        return LayerState(4, 1, np.array([surprisal, 0, 1], dtype=np.float32))

    policy = stop_network(4, 0.5, pays=True)
    assert policy.pre_scan(before()) == ExitAt(4)
    assert policy.draft(drafting(0.4))
    assert not policy.draft(drafting(0.6))
    assert stop_network(4, 0.5, pays=False).pre_scan(before()) is PreScan.SKIP


def test_policies_are_tuned_on_the_planted_agreement(model: EarlyExitModel) -> None:
    draw = torch.Generator().manual_seed(3)
    texts = plain_texts(model, torch.randint(512, (4, 8), generator=draw).tolist(), 48)
    tuned = tune(model, texts)
    assert tuned.agreement[1] == pytest.approx(0.8, abs=0.1)
    assert tuned.static.config.exit_layer == tuned.layer
    assert tuned.learned.config.candidates == (tuned.layer,)
    with pytest.raises(ValueError, match="no text has a second token"):
        tune(model, [([1, 2], [3])])


def test_what_cannot_be_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path / "out", WHEELS=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"gpu: WHEELS '{tmp_path}' holds no *.whl; give a folder of wheels, or leave it out\n"
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out"), "--stages", "bundled,nothing"])
    assert "no stage is called nothing; with full shapes there are experience, bundled" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--out", str(tmp_path / "out")]) == 2
        assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wheels_are_installed_first_and_a_broken_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    with ZipFile(tmp_path / "sound-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sound.py", "")
        wheel.writestr("sound-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sound\nVersion: 1.0\n")
        wheel.writestr("sound-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("sound-1.0.dist-info/RECORD", "")
    done = run(tmp_path / "out", WHEELS=str(tmp_path), STAGES="nothing")
    assert done.returncode == 2
    assert (tmp_path / "out" / "packages" / "sound.py").exists()
    assert "gpu: broken-1.0-py3-none-any.whl could not be installed; what needs it is skipped" in done.stderr
    assert "gpu: sound" not in done.stderr


def test_budgets_keep_the_promise_and_name_stages_that_there_are() -> None:
    assert sum(BUDGETS["full"].values()) <= 340  # of six minutes, with wheels to install and a report to write
    for budgets in BUDGETS.values():
        assert set(budgets) <= set(STAGES)
        assert next(iter(budgets)) == "experience"  # leaves policies to the next


def test_gpu_tests_are_judged_by_their_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(code: int, summary: str) -> Callable[..., Any]:
        return lambda *_, **__: subprocess.CompletedProcess([], code, f"..\n{summary}\n", "")

    for code, summary in ((0, "5 passed in 1s"), (1, "1 failed, 4 passed in 1s"), (0, "5 skipped in 1s"), (4, "bad")):
        monkeypatch.setattr(subprocess, "run", ended(code, summary))
        gpu_stages.gpu_tests(stage(tmp_path, "tests"))
    assert [check["ok"] for check in records(tmp_path, "check")] == [True, False]
    assert records(tmp_path, "skipped") == ["tests/lede/test_gpu.py: 5 skipped in 1s"]
    assert records(tmp_path, "failure") == ["pytest ended with 4: bad"]


def test_copy_bandwidth_is_a_rate() -> None:
    assert 1e7 < copy_bandwidth(torch.device("cpu")) < 1e14
