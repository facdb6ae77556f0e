"""`lede bench` on a tiny saved model: a whole run, a stopped one, failures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lede.generation
import lede.interleaving
from lede.bench import run_bench
from lede.bench_config import BenchConfig
from lede.bench_log import RunLog
from lede.bench_runs import CONTROL, PLAIN, PROFILE, RUNS, TRANSFORMERS, PromptRun, read_prompts, read_runs, read_setup
from lede.cli import main
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy
from tests.tiny_models import N_LAYERS, plain_generate, tiny_hf_model

STATIC = "static:exit_layer=3;draft_length=3"
N_TEST, N_TOKENS = 4, 8


class Letters:
    """A tokenizer of one id a character."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 128 for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) + " " * (i % 3 == 0) for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(128)}


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return load_model((tiny_hf_model("llama", torch.float32), Letters()))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "prompts.jsonl"
    entries = [
        {"prompt": f"prompt {'abc'[n % 3] * n}", "category": "ab"[n % 2], "reference": "a b c", "split": split}
        for n, split in enumerate(["validation", "validation", *["test"] * N_TEST])
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def config(prompts: Path, out: Path, **settings: Any) -> BenchConfig:
    settings = {"policy": (STATIC,), "max_new_tokens": N_TOKENS, "profile_repeats": 1, **settings}
    return BenchConfig(out=out, suite=(f"jsonl:{prompts}",), **settings)


def without_times(run: PromptRun) -> tuple[Any, ...]:
    return run.key, run.turn, run.token_ids, run.rounds, run.head_reads, run.divergence, run.error, run.text


@pytest.fixture(scope="module")
def finished(model: EarlyExitModel, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    run_bench(config(prompts, out), model)
    return out


def test_a_run_decodes_every_prompt_by_everybody(finished: Path, model: EarlyExitModel) -> None:
    runs, setup = read_runs(finished), read_setup(finished)
    names = [TRANSFORMERS, PLAIN, CONTROL, STATIC]
    assert [contender.name for contender in setup.contenders] == names
    assert sorted((run.policy, run.prompt_index) for run in runs) == sorted((n, i) for n in names for i in range(2, 6))
    assert all(run.error is None and run.divergence is None for run in runs)
    prompts = {prompt.prompt_index: prompt for prompt in read_prompts(finished)}
    for run in runs:
        assert list(run.token_ids) == plain_generate(model, list(prompts[run.prompt_index].ids), N_TOKENS)
        assert run.prompt_tokens == len(prompts[run.prompt_index].ids)
        assert run.category == prompts[run.prompt_index].category
        assert run.text == Letters().decode(list(run.token_ids))
        committed = sum(counts[2] for counts in run.rounds)
        assert committed == (0 if run.policy == TRANSFORMERS else N_TOKENS - 1)
    drafted = [run.rounds for run in runs if run.policy == STATIC]
    assert all(counts[3] == (3 if counts[0] else 0) for rounds in drafted for counts in rounds)
    assert any(counts[0] for rounds in drafted for counts in rounds)


def test_turns_are_places_in_the_order(finished: Path) -> None:
    runs = read_runs(finished)
    orders = {index: [run.policy for run in runs if run.prompt_index == index] for index in range(2, 6)}
    assert len({tuple(order) for order in orders.values()}) > 1
    for index in range(2, 6):
        assert [run.turn for run in runs if run.prompt_index == index] == [0, 1, 2, 3]


def test_the_setup_tells_what_the_run_depends_on(finished: Path) -> None:
    setup = read_setup(finished)
    (suite,) = setup.suites
    assert set(suite.test) == {2, 3, 4, 5}
    assert set(suite.validation) == {0, 1}
    assert len(suite.agreement) == N_LAYERS
    assert suite.agreement[-1] == pytest.approx(1)
    assert len(setup.verification_seconds) == 17
    assert (finished / PROFILE).exists()
    assert setup.config["policy"] == [STATIC]
    assert setup.config["max_new_tokens"] == N_TOKENS


def test_a_report_comes_out(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert rows[STATIC]["exact"] == "yes"
    assert rows[STATIC]["n_prompts"] == N_TEST
    assert rows[STATIC]["n_failed"] == 0
    assert STATIC in (finished / "report.md").read_text()
    assert list(finished.glob("*.png"))


def stop_after(monkeypatch: pytest.MonkeyPatch, n_decodes: int) -> list[str]:
    """Let the engine be interrupted in a decode; returns the ids that were decoded, a list that grows."""
    calls: list[str] = []

    def generate(*args: Any, **kwargs: Any) -> Any:
        if len(calls) == n_decodes:
            raise KeyboardInterrupt
        calls.append(str(list(kwargs["input_ids"])))
        return lede.generation.generate(*args, **kwargs)

    monkeypatch.setattr(lede.interleaving, "generate", generate)
    return calls


def test_a_stopped_run_goes_on_where_it_was(
    finished: Path, model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = config(prompts, tmp_path / "out")
    with monkeypatch.context() as patched:
        stop_after(patched, 3 + 2 * 3 + 1)  # a warm-up, two prompts and a part of the third, by three on the engine
        with pytest.raises(KeyboardInterrupt):
            run_bench(settings, model)
    assert "the same command goes on" in capsys.readouterr().out
    kept = read_runs(settings.out)
    assert len(kept) == 2 * 4
    with (settings.out / RUNS).open("ab") as file:
        file.write(b'{"suite": "prompts", "policy": "pl')  # as a stop at the worst moment leaves it
    with monkeypatch.context() as patched:
        calls = stop_after(patched, 100)
        run_bench(settings, model)
    runs = read_runs(settings.out)
    assert runs[: len(kept)] == kept
    assert [without_times(run) for run in runs] == [without_times(run) for run in read_runs(finished)]
    done = {str(list(p.ids)) for p in read_prompts(settings.out) if p.prompt_index in {r.prompt_index for r in kept}}
    assert not done & set(calls)
    with monkeypatch.context() as patched:
        calls = stop_after(patched, 0)
        run_bench(settings, model)  # everything is there
    assert calls == []


class Counting(Policy):
    """Learns how many texts it has begun."""

    kind = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def begin(self, n_prompt_tokens: int) -> None:
        self.begun += 1

    def scan(self, state: Any) -> bool:
        return False

    def draft(self, state: Any) -> bool:
        return False

    def reset(self) -> None:
        self.begun = 0

    def state(self) -> dict[str, Any]:
        return {"begun": self.begun} if self.begun else {}

    def restore(self, state: dict[str, Any]) -> None:
        self.begun = state["begun"]


def test_what_is_learned_online_survives_a_stop(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lede.bench_lineup

    policies: list[Counting] = []

    def load(folder: Path) -> Counting:
        policies.append(Counting())
        return policies[-1]

    monkeypatch.setattr(lede.bench_lineup, "load_policy", load)
    settings = config(prompts, tmp_path / "out")
    with monkeypatch.context() as patched:
        stop_after(patched, 3 + 2 * 3 + 2)
        with pytest.raises(KeyboardInterrupt):
            run_bench(settings, model)
    with RunLog(settings.out) as log:
        assert log.state("prompts", STATIC) == {"begun": 2}  # the warm-up was forgotten
    run_bench(settings, model)
    assert policies[-1].begun == N_TEST
    with RunLog(settings.out) as log:
        assert log.state("prompts", STATIC) == {"begun": N_TEST}


def test_every_repetition_begins_with_nothing_learned(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop in the midst of a repetition does not make it begin again."""
    import lede.bench_lineup

    policies: list[Counting] = []

    def load(folder: Path) -> Counting:
        policies.append(Counting())
        return policies[-1]

    monkeypatch.setattr(lede.bench_lineup, "load_policy", load)
    settings = config(prompts, tmp_path / "out", repeats=2)
    with monkeypatch.context() as patched:
        stop_after(patched, 3 + (N_TEST + 2) * 3 + 2)
        with pytest.raises(KeyboardInterrupt):
            run_bench(settings, model)
    with RunLog(settings.out) as log:
        assert log.state("prompts", STATIC) == {"begun": 2}  # two prompts of the second repetition
    run_bench(settings, model)
    assert policies[-1].begun == N_TEST
    assert [run.repeat for run in read_runs(settings.out) if run.policy == STATIC] == [0] * N_TEST + [1] * N_TEST


def test_a_state_written_before_its_decode_does_not_count(tmp_path: Path, finished: Path) -> None:
    """A stop between the two leaves the state of a decode that was never recorded."""
    one, two, *_ = [run for run in read_runs(finished) if run.policy == STATIC]
    with RunLog(tmp_path) as log:
        log.append(one, {"begun": 1})
        log.append(two, {"begun": 2})
    lines = (tmp_path / RUNS).read_bytes().splitlines(keepends=True)
    (tmp_path / RUNS).write_bytes(lines[0])
    with RunLog(tmp_path) as log:
        assert log.state(one.suite, STATIC) == {"begun": 1}
        assert not log.has(*two.key)
        log.append(two, {"begun": 2})
    with RunLog(tmp_path) as log:
        assert log.state(one.suite, STATIC) == {"begun": 2}
        assert log.runs == [one, two]


def test_a_failing_prompt_is_counted_and_the_run_goes_on(
    model: EarlyExitModel, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs["policy"] is not None and len(kwargs["input_ids"]) == len("prompt cccc") + 1:
            raise RuntimeError("out of\nmemory")
        return lede.generation.generate(*args, **kwargs)

    monkeypatch.setattr(lede.interleaving, "generate", generate)
    report = run_bench(config(prompts, tmp_path / "out"), model)
    failed = [run for run in read_runs(tmp_path / "out") if run.error is not None]
    assert [(run.policy, run.prompt_index, run.error) for run in failed] == [(STATIC, 5, "RuntimeError: out of memory")]
    rows = {row["name"]: row for row in report["rows"]}
    assert (rows[STATIC]["n_failed"], rows[STATIC]["n_prompts"], rows[PLAIN]["n_failed"]) == (1, N_TEST, 0)
    assert rows[STATIC]["exact"] == "yes"


def test_a_rival_that_the_family_cannot_run_is_told(prompts: Path, tmp_path: Path) -> None:
    gpt2 = load_model((tiny_hf_model("gpt2", torch.float32), Letters()))
    settings = config(prompts, tmp_path / "out", policy=("assistant-early-exit:layer=2", "assistant-early-exit"))
    report = run_bench(settings, gpt2)
    rows = {row["name"]: row for row in report["rows"]}
    for name in settings.policy:
        assert rows[name]["n_failed"] == N_TEST
        assert "IndexError" in rows[name]["error"]
    assert rows[PLAIN]["n_failed"] == 0


def test_sampled_runs_repeat_with_other_luck(model: EarlyExitModel, prompts: Path, tmp_path: Path) -> None:
    settings = config(prompts, tmp_path / "out", temperature=1.0, repeats=2)
    report = run_bench(settings, model)
    runs = {run.key[1:]: run for run in read_runs(settings.out)}
    assert len(runs) == 4 * N_TEST * 2
    assert all(run.divergence is None and run.error is None for run in runs.values())
    assert {row["exact"] for row in report["rows"]} == {"law"}
    plain = [[runs[PLAIN, index, repeat].token_ids for index in range(2, 6)] for repeat in (0, 1)]
    assert plain[0] != plain[1]
    assert plain == [[runs[CONTROL, index, repeat].token_ids for index in range(2, 6)] for repeat in (0, 1)]


def test_names_are_tuned_on_validation_prompts_alone(model: EarlyExitModel, prompts: Path, tmp_path: Path) -> None:
    settings = config(prompts, tmp_path / "out", policy=("static",), sweep=("static",), max_new_tokens=4)
    run_bench(settings, model)
    setup = read_setup(settings.out)
    found = {contender.name: contender for contender in setup.contenders}
    assert found["static"].settings.startswith("static:exit_layer=")
    assert found["static"].cost.evaluations > 0
    assert found["static"].cost.prompts == 2
    others = [each for each in setup.contenders if each.settings.startswith("static:") and each.name != "static"]
    assert len(others) == 4
    assert all(each.cost.evaluations == 0 for each in others)
    assert {run.policy for run in read_runs(settings.out)} == set(found)


def test_what_is_moved_between_suites_searches_no_more(model: EarlyExitModel, prompts: Path, tmp_path: Path) -> None:
    settings = config(prompts, tmp_path / "out", policy=("swift",), preset="transfer", n_prompts=1)
    run_bench(settings, model)
    online = {contender.name: contender.online for contender in read_setup(settings.out).contenders}
    assert online["swift"]
    assert not online["swift from prompts"]
    assert not online["conflayers from prompts"]
    runs = {run.policy: run for run in read_runs(settings.out)}
    assert runs["swift"].sections["search"] > 0
    assert all(runs[name].sections["search"] == 0 for name in online if " from " in name)


def test_other_settings_are_refused_by_name(
    finished: Path, model: EarlyExitModel, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"other settings: max_new_tokens \(9, was 8\); give another --out"):
        run_bench(config(prompts, finished, max_new_tokens=9), model)
    with pytest.raises(ValueError, match=r"policy \(\['prompt-lookup'\], was \['static"):
        run_bench(config(prompts, finished, policy=("prompt-lookup",)), model)
    other = load_model((tiny_hf_model("llama", torch.float32, seed=1), Letters()))
    with pytest.raises(ValueError, match=r"other settings: logits .* of their spread apart"):
        run_bench(config(prompts, finished), other)
    before = prompts.read_text()
    try:
        prompts.write_text(before.replace("prompt bbb", "PROMPT bbb"))
        with pytest.raises(ValueError, match="prompts: the files of the suites have changed"):
            run_bench(config(prompts, finished), model)
    finally:
        prompts.write_text(before)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds something that no benchmark wrote; give a new or empty folder"):
        run_bench(config(prompts, tmp_path), model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": ()}, "give at least one contender, as --policy, --sweep or --preset"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"policy": ("statik",)}, "policy 'statik' is neither a folder nor one of"),
        ({"policy": ("static:exit_layer=6",)}, "exit layer 6 is outside 1..5"),
        ({"policy": ("assistant-early-exit:layer=6",)}, "exit layer 6 is outside 1..5"),
        ({"max_new_tokens": 256}, "max_new_tokens 256 leaves no room for a prompt in the model's 256 positions"),
        ({"preset": "ablation"}, "the preset ablation takes a learned policy apart"),
        ({"policy": ("static",), "validation_prompts": 0}, "'static' is tuned on validation prompts, and"),
    ],
)
def test_unusable_settings(
    settings: dict[str, Any], message: str, model: EarlyExitModel, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run_bench(config(prompts, tmp_path / "out", **settings), model)


def test_prompts_without_room_are_left_out(model: EarlyExitModel, prompts: Path, tmp_path: Path) -> None:
    settings = config(prompts, tmp_path / "out", max_new_tokens=256 - len("prompt aaaa"), policy=(STATIC,), n_prompts=1)
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, 0)
        with pytest.raises(KeyboardInterrupt):
            run_bench(settings, model)
    assert read_setup(settings.out).suites[0].too_long == 1


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "--out",
        str(tmp_path / "out"),
        "--policy",
        "static:exit_layer=3",
        "--policy",
        "prompt-lookup",
    ]
    arguments += ["--n-prompts", "2", "--max-new-tokens", "6", "--profile-repeats", "1", "--validation-prompts", "1"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "demo: 2 test, 1 validation prompts" in told
    assert "prompt-lookup" in told
    assert main([*arguments[:-1], "2"]) == 2
    assert "--validation-prompts (2, was 1)" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, 1)
        (tmp_path / "out" / RUNS).unlink()
        assert main(arguments) == 130
