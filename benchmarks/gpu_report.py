"""The GPU benchmark: every stage in a process of its own and within its time, one table, one JSON file.

python -m benchmarks.gpu_report --out gpu-report

`gpu.sh` calls this, and says what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUDGETS: dict[str, dict[str, int]] = {
    "full": {"experience": 60, "bundled": 55, "llama-3.2-1b": 70, "llama-2-7b": 85, "tests": 65},
    "tiny": {"experience": 120, "bundled": 120, "tiny": 120, "tests": 120},
}
"""Seconds of each stage by the shapes asked for. What a stage leaves over goes to those after it."""
INEXACT, INCOMPLETE, UNUSABLE = 1, 3, 2
"""Exit codes: a check failed; a stage or contender failed or ran out of time; nothing can be run here."""

_COLUMNS: dict[str, tuple[str, str]] = {
    "model": ("model", ""),
    "dtype": ("dtype", ""),
    "engine": ("engine", ""),
    "policy": ("policy", ""),
    "tokens_per_second": ("tokens/s", ".1f"),
    "over_plain": ("x plain", ".2f"),
    "over_transformers": ("x transformers", ".2f"),
    "acceptance": ("acceptance", ".2f"),
    "accepted_length": ("accepted", ".2f"),
    "exit_layer": ("layer", ".1f"),
    "peak_gb": ("peak GB", ".2f"),
    "repetition": ("repetition", ".2f"),
    "exact": ("exact", ""),
}


@dataclass
class Outcome:
    """How a stage went."""

    stage: str
    """Its name."""
    seconds: float
    """Seconds that it took."""
    budget: float
    """Seconds that it had."""
    error: str | None = None
    """Why it didn't come to its end; None when it did."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """What it had found out by then."""

    def of_kind(self, kind: str) -> list[Any]:
        """Contents of the records of one kind."""
        return [record["content"] for record in self.records if record["kind"] == kind]


def run_stage(command: Sequence[str], stage: str, records: Path, budget: float, log: Path) -> Outcome:
    """Run a stage's process, and end it and what it started when its time is over.

    Args:
        command: The process; its output goes to the log.
        stage: The stage's name.
        records: File that it appends to.
        budget: Seconds.
        log: File that its output is appended to.
    """
    start, error = time.monotonic(), None
    with log.open("ab") as out:
        out.write(f"== {stage}\n".encode())
        out.flush()
        begin = out.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=budget)
        except subprocess.TimeoutExpired:
            error = f"out of time after {budget:.0f} s"
        except BaseException:
            _end(process)
            raise
        else:
            if code:
                error = f"exit code {code}: {_last_line(log, begin)}"
        _end(process)
    return Outcome(stage, time.monotonic() - start, budget, error, read_records(records))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group, such as a compiler's workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path, begin: int) -> str:
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a stage; a last line that was cut off by its end is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def run_stages(
    budgets: dict[str, int], command: Callable[[str, Path], Sequence[str]], log: Path, scratch: Path
) -> list[Outcome]:
    """Run all stages; none stops the others.

    Args:
        budgets: Seconds of each. A stage may take what those before it left over.
        command: The process of a stage that writes its records to a file.
        log: File that their output is appended to.
        scratch: Folder of the records.
    """
    start, allowed, outcomes = time.monotonic(), 0.0, []
    for stage, seconds in budgets.items():
        allowed += seconds
        budget = max(1.0, allowed - (time.monotonic() - start))
        print(f"{stage}: {budget:.0f} s at most ...", flush=True)
        records = scratch / f"{stage}.jsonl"
        outcome = run_stage(command(stage, records), stage, records, budget, log)
        print(f"{stage}: {outcome.error or 'done'}, {outcome.seconds:.0f} s", flush=True)
        outcomes.append(outcome)
    return outcomes


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 where a check failed, else 3 where something is missing from the report, else 0."""
    if any(not check["ok"] for outcome in outcomes for check in outcome.of_kind("check")):
        return INEXACT
    return INCOMPLETE if any(outcome.error or outcome.of_kind("failure") for outcome in outcomes) else 0


def render(outcomes: Sequence[Outcome]) -> str:
    """The table, and below it what each stage said, as Markdown."""
    rows = [row for outcome in outcomes for row in outcome.of_kind("row")]
    cells = [[title for title, _ in _COLUMNS.values()]]
    cells += [[_cell(row.get(key), form) for key, (_, form) in _COLUMNS.items()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for outcome in outcomes:
        lines += ["", f"{outcome.stage}: {outcome.error or 'done'}, {outcome.seconds:.0f} of {outcome.budget:.0f} s"]
        lines += [f"- {note}" for note in outcome.of_kind("note")]
        lines += [f"- skipped: {what}" for what in outcome.of_kind("skipped")]
        lines += [f"- FAILED: {what}" for what in outcome.of_kind("failure")]
        checks = outcome.of_kind("check")
        lines += [f"- CHECK FAILED: {check['what']}: {check['detail']}" for check in checks if not check["ok"]]
        passed = [check for check in checks if check["ok"]]
        lines += [f"- checked: {check['what']}: {check['detail']}" for check in passed if "text" not in check["what"]]
        if passed:
            lines.append(f"- {len(passed)} of {len(checks)} checks hold")
    return "\n".join(lines) + "\n"


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def about(device: str) -> dict[str, Any]:
    """The machine and the versions."""
    import torch

    from lede.checkpoint import versions

    on_cuda = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(torch.device(device)) if on_cuda else device
    return {"device": name, "cuda": torch.version.cuda, "python": sys.version.split()[0], "versions": versions()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--shapes", choices=BUDGETS, default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", default="", help="names, separated by commas; all unless given")
    parser.add_argument("--no-compile", action="store_true")
    asked = parser.parse_args(arguments)
    budgets = BUDGETS[asked.shapes]
    unknown = sorted(set(filter(None, asked.stages.split(","))) - budgets.keys())
    if unknown:
        parser.error(
            f"no stage is called {', '.join(unknown)}; with {asked.shapes} shapes there are {', '.join(budgets)}"
        )
    if asked.stages:
        budgets = {name: seconds for name, seconds in budgets.items() if name in asked.stages.split(",")}
    import torch

    if torch.device(asked.device).type == "cuda" and not torch.cuda.is_available():
        print("gpu: there is no CUDA GPU that torch can use; SHAPES=tiny DEVICE=cpu tries the steps", file=sys.stderr)
        return UNUSABLE
    asked.out.mkdir(parents=True, exist_ok=True)
    log = asked.out / "log.txt"
    log.unlink(missing_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lede-gpu-") as scratch:

        def command(stage: str, records: Path) -> list[str]:
            parts = [sys.executable, "-m", "benchmarks.gpu_stages", stage, "--device", asked.device]
            parts += ["--effort", asked.shapes, "--scratch", scratch, "--records", str(records)]
            return parts + ["--no-compile"] * asked.no_compile

        outcomes = run_stages(budgets, command, log, Path(scratch))
    code, seconds = exit_code(outcomes), time.monotonic() - start
    machine = about(asked.device)
    facts = f"{machine['device']}, {', '.join(f'{name} {version}' for name, version in machine['versions'].items())}"
    text = f"{facts}\n\n{render(outcomes)}\n{seconds:.0f} s in all, exit code {code}\n"
    report = {
        **machine,
        "shapes": asked.shapes,
        "seconds": seconds,
        "exit_code": code,
        "stages": list(map(asdict, outcomes)),
    }
    (asked.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (asked.out / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{text}report.json, report.md and log.txt are in {asked.out}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
