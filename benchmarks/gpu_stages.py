"""One stage of the GPU benchmark in a process of its own, so that it can fail or run out of time alone.

python -m benchmarks.gpu_stages llama-2-7b --scratch FOLDER --device cuda --records FILE

Everything found out is appended to the file at once, one JSON object a line: what a stage had written before it was
ended still counts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_measure import (
    Row,
    compiled,
    contenders,
    copy_bandwidth,
    measure,
    smallest_margin,
    warm_up_seconds,
)
from benchmarks.gpu_policies import Text, Tuned, plain_texts, tune
from benchmarks.gpu_shapes import FULL, SHAPES, TINY, Effort
from benchmarks.planted_model import planted_llama
from lede import demo
from lede.exactness import NOISE
from lede.interleaving import Contender
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, RandomPolicy, parse_policy
from lede.prompts import encode_prompts

ROOT = Path(__file__).parents[1]
PROMPTS = Path(demo.__file__).parent / "prompts.jsonl"
ROOM = 1.25
"""Memory that a model needs over its weights: caches, logits, workspace."""
HAND_MADE = "lede (hand-made network)"
TRAINED = {"lede (Q-network)": "run", "lede (thresholds)": "run-thresholds"}
"""Policies that `experience` may leave in a folder."""


@dataclass(frozen=True)
class Stage:
    """What a stage is given."""

    name: str
    """Its name."""
    device: torch.device
    """Where it decodes."""
    effort: Effort
    """How much it does."""
    scratch: Path
    """Folder that the stages share."""
    records: Path
    """Where it writes what it finds."""
    compile: bool
    """Whether the compiled engine is timed."""

    def write(self, kind: str, content: Any) -> None:
        """Append a record: a row, note, skipped, failure or check."""
        with self.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": self.name, "kind": kind, "content": content}) + "\n")

    def check(self, what: str, ok: bool, detail: str) -> None:
        """Record whether something that must hold does."""
        self.write("check", {"what": what, "ok": ok, "detail": detail})


def lacking(*packages: str) -> list[str]:
    """The packages among these that aren't installed."""
    return [package for package in packages if find_spec(package) is None]


def demo_prompts() -> dict[str, list[str]]:
    """The bundled prompts by split."""
    splits: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        splits.setdefault(entry["split"], []).append(entry["prompt"])
    return splits


def experience(stage: Stage) -> None:
    """Collect traces and rollouts on the bundled model; fit thresholds to seconds, and train where d3rlpy is."""
    missing = lacking("gymnasium", "zarr")
    if missing:
        stage.write("skipped", f"collecting, fitting and training: {' and '.join(missing)} not installed")
        return
    from rich.console import Console

    from lede.demo.learning import Effort as LearningEffort
    from lede.demo.learning import gather, learn, price
    from lede.features import default_candidates

    size, model = stage.effort, load_model("demo", stage.device, torch.bfloat16)
    prompts = demo_prompts()
    prompts["validation"] = prompts["validation"][: max(2, size.train_prompts // 4)]
    effort = LearningEffort(
        size.train_prompts, size.rollout_prompts, size.learned_tokens, size.repeats, {"wall-clock": size.steps}
    )
    traces, validation = gather(model, prompts, effort, 0, stage.scratch)
    stage.write("note", f"teacher: traces of {len(traces)} and {len(validation)} prompts collected")
    stage.write("note", f"rollout: the environment played on {size.rollout_prompts} prompts")
    costs = price(model, effort, Console(), stage.scratch)
    stage.write("note", f"a head read takes as long as {costs.head_over_layer():.2f} layers of the bundled model")
    candidates = default_candidates(model.n_layers)
    learn("thresholds", effort, 0, stage.scratch, candidates)
    stage.write("note", "thresholds fitted to seconds")
    if lacking("d3rlpy"):
        stage.write("skipped", "training a Q-network: d3rlpy not installed")
        return
    learn("wall-clock", effort, 0, stage.scratch, candidates)
    stage.write("note", f"Q-network trained for seconds, {size.steps} updates")


def bundled(stage: Stage) -> None:
    """Decode the bundled model, under policies that the stage before trained, or under a hand-made one."""
    prompts = demo_prompts()

    def build(dtype: torch.dtype) -> EarlyExitModel:
        return load_model("demo", stage.device, dtype)

    model = build(torch.bfloat16)
    tuning, timed = (encode_prompts(model.tokenizer, prompts[split]) for split in ("validation", "test"))
    tuned, _ = _tuned(stage, model, tuning[: stage.effort.tuning_prompts])
    folders = {name: stage.scratch / run / "policy" for name, run in TRAINED.items()}
    learned = {name: parse_policy(str(path)) for name, path in folders.items() if (path / "config.json").exists()}
    if not learned:
        stage.write("note", "nothing was trained; the hand-made network stands in")
    _decode(stage, model, build, timed, tuned, learned or {HAND_MADE: tuned.learned})


def planted(stage: Stage) -> None:
    """Decode a planted model of the shape that the stage is called after."""
    shape = SHAPES[stage.name]()
    count, length = stage.effort.tuning_prompts + stage.effort.prompts, stage.effort.prompt_tokens
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(shape.config.vocab_size, (count, length), generator=draw).tolist()
    tuning, timed = prompts[: stage.effort.tuning_prompts], prompts[stage.effort.tuning_prompts :]

    def build(dtype: torch.dtype) -> EarlyExitModel | None:
        if stage.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(stage.device)
            needed = ROOM * shape.n_bytes(dtype)
            if free < needed:
                stage.write("skipped", f"{dtype}: {needed / 1e9:.0f} GB needed, the GPU has {free / 1e9:.0f} GB free")
                return None
        return load_model((planted_llama(shape.config, shape.plan, stage.device, dtype), None))

    model = build(torch.bfloat16)
    if model is not None:
        tuned, texts = _tuned(stage, model, tuning)
        found = tuned.agreement[shape.plan.exit_layer - 1]
        stage.write("note", f"agreement at layer {shape.plan.exit_layer}: {found:.2f}, planted {shape.plan.agreement}")
        margin, most = smallest_margin(model, texts), NOISE[torch.bfloat16]
        stage.check("planted margins", margin > most, f"{margin:.2f} of the largest logit at least, noise is {most}")
        _decode(stage, model, build, timed, tuned, {HAND_MADE: tuned.learned})


def _tuned(stage: Stage, model: EarlyExitModel, prompts: Sequence[list[int]]) -> tuple[Tuned, list[Text]]:
    """Both policies that arithmetic gives, and the texts that it looked at."""
    texts = plain_texts(model, prompts, stage.effort.tokens)
    tuned = tune(model, texts)
    stage.write(
        "note",
        f"static by arithmetic: layer {tuned.layer}, length {tuned.length}, {tuned.expected_speedup:.2f}x plain "
        f"expected; the hand-made network stops drafting above {tuned.surprisal:.2f} nats",
    )
    return tuned, texts


def _decode(
    stage: Stage,
    model: EarlyExitModel,
    build: Callable[[torch.dtype], EarlyExitModel | None],
    prompts: Sequence[list[int]],
    tuned: Tuned,
    learned: dict[str, Policy | None],
) -> None:
    """Time a model in bfloat16, check it in float32, then time it compiled: what takes longest comes last.

    Args:
        stage: What is asked for.
        model: The model in bfloat16.
        build: Builds it in a dtype; None where there is no room.
        prompts: Prompts to decode.
        tuned: What arithmetic chose.
        learned: Learned policies by name.
    """
    effort = stage.effort
    policies: dict[str, Policy | None] = {
        "plain": None,
        f"static {tuned.layer}x{tuned.length}": tuned.static,
        **learned,
    }
    timed = list(prompts[: effort.prompts])
    rows = _measure(stage, model, contenders(model, policies, effort.tokens), timed)
    _roofline(stage, model, rows)

    exact = build(torch.float32)
    if exact is not None:
        checked = {**policies, "random": RandomPolicy(seed=0)}
        _measure(stage, exact, contenders(exact, checked, effort.checked_tokens), timed[: effort.checked_prompts])
        del exact

    fast, how = compiled(model) if stage.compile else (None, "not asked for")
    if fast is None:
        stage.write("skipped", f"the compiled engine: {how}")
    else:
        stage.write("note", f"layers {how}")
        _measure(stage, model, contenders(model, policies, effort.tokens, fast), timed, again=True)


def _measure(
    stage: Stage, model: EarlyExitModel, found: Sequence[Contender], prompts: Sequence[list[int]], again: bool = False
) -> list[Row]:
    """Warm up, measure and record, every text's verdict as a check.

    With `again`, contenders on the eager engine are in the run for the ratios alone, and have their rows already.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    seconds = warm_up_seconds(model, found, prompts[0])
    with_compiled = " with compiled ones" if again else ""
    stage.write("note", f"{dtype}: {len(found)} contenders{with_compiled} warmed up in {seconds:.1f} s")
    result = measure(model, found, prompts, {"model": stage.name, "dtype": dtype})
    for row in result.rows:
        if not again or row["engine"] == "compiled":
            stage.write("row", row)
        if again and row["engine"] == "compiled" and row["over_eager_plain"] is not None:
            stage.write("note", f"{row['policy']}, compiled: {row['over_eager_plain']:.2f}x plain decoding, eager")
        if row["engine"] != "transformers":  # whose text decides
            name = f"{dtype}, {row['engine']}, {row['policy']}"
            stage.check(f"text of {name}", row["exact"] != "NO", f"exact: {row['exact']}")
    for failure in result.failures:
        stage.write("failure", f"{dtype}: {failure}")
    return result.rows


def _roofline(stage: Stage, model: EarlyExitModel, rows: Sequence[Row]) -> None:
    """Say how near plain decoding comes to reading the weights as fast as memory is copied."""
    hf_model: Any = model.hf_model
    read = sum(weight.numel() * weight.element_size() for weight in hf_model.parameters())
    if not model.config.tie_word_embeddings:
        embedding = hf_model.get_input_embeddings().weight
        read -= embedding.numel() * embedding.element_size()
    bandwidth = copy_bandwidth(model.device)
    plain = next((row for row in rows if row["policy"] == "plain" and row["engine"] == "eager"), None)
    share = "" if plain is None else f"; plain decoding reaches {plain['tokens_per_second'] * read / bandwidth:.0%}"
    stage.write(
        "note",
        f"memory roofline: {bandwidth / read:.0f} tokens/s, {read / 1e9:.2f} GB a token at a measured "
        f"{bandwidth / 1e9:.0f} GB/s{share}",
    )


def gpu_tests(stage: Stage) -> None:
    """Run the tests that need a CUDA device."""
    if lacking("pytest"):
        stage.write("skipped", "tests/lede/test_gpu.py: pytest not installed")
        return
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu"]
    # into the log as it comes, so that it is known how far they got if their time is over
    teed = f"set -o pipefail; {shlex.join([*command, 'tests/lede/test_gpu.py'])} 2>&1 | tee -a /dev/stderr"
    done = subprocess.run(
        ["bash", "-c", teed], cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace", check=False
    )
    summary = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "pytest said nothing")
    if done.returncode not in (0, 1):
        stage.write("failure", f"pytest ended with {done.returncode}: {summary}")
    elif done.returncode == 0 and "passed" not in summary:
        stage.write("skipped", f"tests/lede/test_gpu.py: {summary.strip('= ')}")
    else:
        stage.check("tests/lede/test_gpu.py", done.returncode == 0, summary.strip("= "))


STAGES: dict[str, Callable[[Stage], None]] = {
    "experience": experience,
    "bundled": bundled,
    **dict.fromkeys(SHAPES, planted),
    "tests": gpu_tests,
}
"""Every stage by name, in order."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a stage as the command line asks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--effort", choices=("full", "tiny"), default="full")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--no-compile", action="store_true")
    asked = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("highest")  # TF32 off
    effort = FULL if asked.effort == "full" else TINY
    device = torch.device(asked.device)
    STAGES[asked.stage](Stage(asked.stage, device, effort, asked.scratch, asked.records, not asked.no_compile))


if __name__ == "__main__":
    main()
