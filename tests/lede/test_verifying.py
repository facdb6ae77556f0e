"""`lede verify`: what it finds on models that are sound, on ties, and on decoding that is broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import lede.exactness
import lede.generation
import lede.rivals
from lede import verify_table
from lede.cli import main
from lede.models import EarlyExitModel, load_model
from lede.policies import StaticPolicy
from lede.verify_results import DtypeRun, Finding, Tally, VerifyReport
from lede.verifying import VerifyConfig, verify
from tests.tiny_models import plain_generate

HEADS = ("def add(a, b):", "import os", "class Stack:")
STATIC = "static:exit_layer=4;draft_length=4"
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Change = Callable[[list[int]], list[int]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(HEADS) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def demo() -> EarlyExitModel:
    return load_model("demo")


def change(monkeypatch: pytest.MonkeyPatch, how: Change, plain: bool = False, first: str = HEADS[0]) -> None:
    """Change the text of one prompt under policies, or of the engine without one."""
    real = lede.generation.generate

    def broken(model: EarlyExitModel, *, input_ids: Sequence[int], policy: Any, **settings: Any) -> Any:
        out = real(model, input_ids=input_ids, policy=policy, **settings)
        if (policy is None) == plain and model.tokenizer.decode(input_ids) == first:
            new = how(out.sequences[0, len(input_ids) :].tolist())
            return type("Output", (), {"sequences": torch.tensor([[*input_ids, *new]])})
        return out

    monkeypatch.setattr(lede.generation, "generate", broken)


def other_token(position: int) -> Change:
    return lambda text: [*text[:position], text[position] + 1, *text[position + 1 :]]


def runner_up(model: EarlyExitModel, head: str, position: int) -> Change:
    """The second likeliest token at a position."""
    ids = model.tokenizer(head)["input_ids"]

    def changed(text: list[int]) -> list[int]:
        with torch.inference_mode():
            logits = model.hf_model(torch.tensor([[*ids, *text[:position]]])).logits[0, -1]
        return [*text[:position], int(logits.topk(2).indices[1]), *text[position + 1 :]]

    return changed


def test_a3_1_a_sound_model_is_exact_in_float32_and_its_ties_are_told_in_half(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "report.json"
    policies = ["--policy", STATIC, "--policy", "threshold"]
    arguments = ["--prompts", str(prompts), "--max-new-tokens", "8", "--out", str(out)]
    assert main(["verify", *policies, *arguments]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    for number in (1, 2, 3):
        assert f"float32, prompt {number}: exact" in told.out
        assert f"bfloat16, prompt {number}" in told.out
    report = json.loads(out.read_text())
    assert report["passed"] is True
    assert report["model"] == "demo"
    assert report["config"]["policy"] == [STATIC, "threshold"]
    single, half = report["runs"]
    assert (single["dtype"], single["noise"], half["dtype"], half["noise"]) == ("float32", 1e-5, "bfloat16", 3e-2)
    for run in (single, half):
        assert [each["policy"] for each in run["policies"]] == ["plain", STATIC, "threshold"]
        assert [each["prompts"] for each in run["policies"]] == [3, 3, 3]
        assert len(run["prompts"]) == 9
    assert [each["verdict"] for each in single["policies"]] == ["exact"] * 3
    assert [each["tokens"] for each in single["policies"]] == [24] * 3
    assert {each["verdict"] for each in half["prompts"]} <= {"exact", "tie"}
    assert "asked for" not in told.out


def test_fewer_prompts_than_asked_for_are_told(demo: EarlyExitModel, prompts: Path) -> None:
    report = verify(VerifyConfig((STATIC,), prompts, max_new_tokens=2, n_prompts=9), demo)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(verify_table.report(report))
    assert "9 prompts were asked for; the file has 3" in shown.get()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (other_token(5), "FAILURE at token 5, margin "),
        (lambda text: text[:5], "FAILURE at token 5, margin 0.0e+00 (noise 1e-05): the end where transformers has"),
        (lambda text: [*text, 7], "FAILURE at token 8, margin"),
    ],
    ids=["another-token", "too-short", "too-long"],
)
def test_a_text_that_differs_fails(
    how: Change, said: str, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(monkeypatch, how)
    arguments = ["--dtype", "float32", "--prompts", str(prompts), "--max-new-tokens", "8", "--n-prompts", "2"]
    assert main(["verify", "--policy", STATIC, "--policy", "static:exit_layer=2", *arguments]) == 1
    lines = capsys.readouterr().out.splitlines()
    for policy in (STATIC, "static:exit_layer=2"):
        assert [line for line in lines if line.startswith(f"float32, prompt 1, {policy}: {said}")]
    assert "float32, prompt 2: exact" in lines
    assert not [line for line in lines if "prompt 3" in line]
    assert ["plain", "2", "16", "2", "0", "0", "0", "exact"] in [line.split() for line in lines]


def test_a_difference_is_told_in_full(demo: EarlyExitModel, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, runner_up(demo, HEADS[0], 5))
    report = verify(VerifyConfig((STATIC,), prompts, max_new_tokens=8), demo)
    (run,) = report.runs
    assert run.dtype == "float32"
    plain, static = (each for each in run.findings if each.prompt == 1)
    assert (plain.verdict, plain.tokens, static.verdict, static.tokens) == ("exact", 8, "failure", 6)
    (apart,) = static.differences
    ids = demo.tokenizer(HEADS[0])["input_ids"]
    text = plain_generate(demo, ids, 8)
    with torch.inference_mode():
        logits = demo.hf_model(torch.tensor([[*ids, *text[:5]]])).logits[0, -1].double()
    top = logits.topk(2)
    assert (apart.reference, apart.position, apart.noise, apart.tie) == ("transformers", 5, 1e-5, False)
    assert (apart.wanted, apart.found) == tuple(top.indices.tolist())
    assert apart.margin == pytest.approx(float((top.values[0] - top.values[1]) / logits.abs().max()), rel=1e-3)
    assert (apart.wanted_text, apart.found_text) == tuple(demo.tokenizer.decode([i]) for i in top.indices.tolist())
    assert report.exit_code == 1
    assert not report.passed


def test_a_difference_within_the_noise_is_a_tie(
    demo: EarlyExitModel, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same second token passes where the dtype's noise reaches that far."""
    monkeypatch.setitem(lede.exactness.NOISE, torch.float32, 1.0)
    change(monkeypatch, runner_up(demo, HEADS[0], 5))
    arguments = ["--dtype", "float32", "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert main(["verify", "--policy", STATIC, *arguments]) == 0
    assert f"float32, prompt 1, {STATIC}: numerical tie at token 5, margin " in capsys.readouterr().out


def test_more_than_one_tie_in_few_tokens_fails_in_float32(
    demo: EarlyExitModel, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(lede.exactness.NOISE, torch.float32, 1.0)
    for head in HEADS[:2]:
        change(monkeypatch, runner_up(demo, head, 5), first=head)
    arguments = ["--dtype", "float32", "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert main(["verify", "--policy", STATIC, *arguments]) == 1
    told = capsys.readouterr().out
    assert "TOO MANY TIES" in told
    assert "FAILURE" not in told
    assert f"{STATIC}: 2 ties in 20 tokens of float32, where they must be rarer than one in 10000" in " ".join(
        told.split()
    )


@pytest.mark.parametrize(
    ("dtype", "ties", "tokens", "passed"),
    [
        ("float32", 1, 10, True),
        ("float32", 2, 20_000, False),
        ("float32", 2, 20_001, True),
        ("float64", 1, 10, True),
        ("bfloat16", 9, 10, True),
    ],
)
def test_how_many_ties_are_luck(dtype: str, ties: int, tokens: int, passed: bool) -> None:
    tally = Tally(dtype, "static", 10, tokens, 10 - ties, ties, 0, 0)
    assert tally.passed == passed
    assert tally.verdict == ("ties" if passed else "TOO MANY TIES")


def test_an_engine_that_differs_from_transformers_fails_by_itself(
    demo: EarlyExitModel, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's text, equal to transformers', then differs from the engine's own."""
    change(monkeypatch, other_token(3), plain=True)
    report = verify(VerifyConfig((STATIC,), prompts, max_new_tokens=8, n_prompts=1), demo)
    plain, static = report.runs[0].findings
    assert [each.reference for each in plain.differences] == ["transformers"]
    assert [each.reference for each in static.differences] == ["plain"]
    assert [tally.failures for tally in report.tallies] == [1, 1]


def test_an_exception_is_counted_and_told_and_the_others_go_on(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(text: list[int]) -> list[int]:
        raise RuntimeError("out of\nmemory")

    resets = []
    monkeypatch.setattr(StaticPolicy, "reset", lambda policy: resets.append(policy.config))
    change(monkeypatch, fails)
    arguments = ["--dtype", "float32", "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert main(["verify", "--policy", STATIC, *arguments]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"float32, prompt 1, {STATIC}: error: RuntimeError: out of memory" in lines
    assert "float32, prompt 2: exact" in lines
    assert ["3", "16", "2", "0", "0", "1", "ERROR"] in [line.split()[-7:] for line in lines]
    assert len(resets) == 2  # before the first prompt, and after the one that failed


def test_a_prompt_that_transformers_fails_on_is_compared_with_nothing(
    demo: EarlyExitModel, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, n_calls = lede.rivals.plain_text, iter(range(9))

    def fails(*arguments: Any) -> list[int]:
        if next(n_calls) == 0:
            raise ValueError("no such thing")
        return real(*arguments)

    monkeypatch.setattr(lede.rivals, "plain_text", fails)
    report = verify(VerifyConfig((STATIC,), prompts, max_new_tokens=4, n_prompts=2), demo)
    told = [(each.prompt, each.policy, each.verdict, each.error) for each in report.runs[0].findings]
    said = "transformers' generate: ValueError: no such thing"
    assert told == [
        (1, "plain", "error", said),
        (1, STATIC, "error", said),
        (2, "plain", "exact", None),
        (2, STATIC, "exact", None),
    ]
    assert not report.passed


def test_learned_settings_are_kept_between_prompts_and_forgotten_between_dtypes(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = []
    monkeypatch.setattr(StaticPolicy, "reset", lambda policy: resets.append(policy.config))
    seen: list[tuple[str, list[int]]] = []
    config = VerifyConfig(
        (STATIC, STATIC, "plain"), prompts, max_new_tokens=2, dtype=("bfloat16", "float64", "bfloat16")
    )
    report = verify(config, on_prompt=lambda dtype, found: seen.append((dtype, [each.prompt for each in found])))
    assert len(resets) == 2
    assert [tally.policy for tally in report.tallies] == ["plain", STATIC] * 2
    assert seen == [(dtype, [number] * 2) for dtype in ("bfloat16", "float64") for number in (1, 2, 3)]
    assert [run.noise for run in report.runs] == [3e-2, 0.0]


@pytest.mark.parametrize(("device", "half"), [(None, "bfloat16"), ("cpu", "bfloat16"), ("cuda:1", "float16")])
def test_half_precision_is_the_devices_own(device: str | None, half: str, prompts: Path) -> None:
    assert VerifyConfig((STATIC,), prompts, device=device).dtypes == ("float32", half)


@pytest.mark.gpu
@NEEDS_CUDA
def test_on_a_gpu_in_float32_and_float16(prompts: Path) -> None:
    report = verify(VerifyConfig((STATIC, "threshold"), prompts, max_new_tokens=32, device="cuda"))
    assert [run.dtype for run in report.runs] == ["float32", "float16"]
    assert report.passed


@pytest.mark.gpu
@NEEDS_CUDA
def test_tf32_is_no_float32(prompts: Path) -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(ValueError, match="TF32 is on, so float32 is not computed as float32"):
            verify(VerifyConfig((STATIC,), prompts, device="cuda"))
    finally:
        matmul.fp32_precision = before


def test_a_model_that_is_given_is_taken_as_it_is(demo: EarlyExitModel, prompts: Path) -> None:
    with pytest.raises(ValueError, match="the given model is in float32 and taken as it is, but dtype is bfloat16"):
        verify(VerifyConfig((STATIC,), prompts, dtype=("bfloat16",)), demo)


def test_the_models_own_settings_do_not_act(prompts: Path) -> None:
    """`generate` of transformers would follow them, lede's does not: the reference is the plain greedy text."""
    model = load_model("demo")
    own: Any = model.hf_model.generation_config
    own.do_sample, own.temperature, own.num_beams = True, 5.0, 3
    report = verify(VerifyConfig((STATIC,), prompts, max_new_tokens=8), model)
    assert report.passed
    assert (own.do_sample, own.temperature, own.num_beams) == (True, 5.0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--policy"),
        (["--policy", "statik"], "policy 'statik' is neither a folder"),
        (["--policy", "static:exit_layer=99"], "exit layer 99 is outside"),
        (["--policy", "static", "--temperature", "0.7"], "verify compares greedy texts, got temperature 0.7"),
        (["--policy", "static", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--policy", "static", "--n-prompts", "0"], "--n-prompts must be at least 1, got 0"),
        (
            ["--policy", "static", "--dtype", "int8"],
            "there is no dtype 'int8' to verify in; there are float64, float32",
        ),
        (["--policy", "static", "--max-new-tokens", "99999"], "positions"),
        (["--policy", "static", "--prompts", "nothing.txt"], "nothing.txt"),
        (["--policy", "static", "--out", "."], "is a folder; give a file as --out"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_user_errors_exit_2_before_anything_is_decoded(
    arguments: list[str],
    message: str,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lede.rivals, "plain_text", lambda *_: pytest.fail("decoded"))
    assert main(["verify", "--prompts", str(prompts), *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


def test_the_verdict_is_the_worst_of_all_runs() -> None:
    def report(*findings: Finding) -> VerifyReport:
        runs = (DtypeRun("float32", 1e-5, (Finding(1, 5, "static", 8),)), DtypeRun("bfloat16", 3e-2, findings))
        return VerifyReport("demo", "cpu", "a processor", "sdpa", {}, {}, runs)

    assert report(Finding(1, 5, "static", 8)).exit_code == 0
    assert report(Finding(1, 5, "static", 8), Finding(2, 5, "static", 0, error="Error: no")).exit_code == 1
