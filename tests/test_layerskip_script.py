"""benchmarks/layerskip_llama.sh: a dry run on a tiny model, and what it says when something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.layerskip_check import NotReadyError, check_disk, check_gpu, weights, write_prompts
from lede.cli import COMMANDS
from lede.models import DEMO_FOLDER
from lede.suites import load_suite

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "layerskip_llama.sh"


def run(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("MODELS", "MODEL", "TRAIN", "SUITES")}
    variables = {**kept, "PYTHON": sys.executable, "OUT": str(out), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", str(SCRIPT)], env={**variables, **environment}, capture_output=True, text=True, check=False
    )


def tiny_folder(folder: Path) -> Path:
    """A random Llama of 4 layers with the bundled tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_dry_run_goes_through_every_step_and_a_second_one_does_nothing_again(tmp_path: Path) -> None:
    model, out = tiny_folder(tmp_path / "tiny"), tmp_path / "out"
    done = run(out, DRY_RUN="1", MODEL=str(model))
    assert done.returncode == 0, done.stderr[-3000:]
    for part, suites in (("greedy", {"humaneval"}), ("sampled", {"lm"})):
        folder = out / "tiny" / part
        report = json.loads((folder / "bench" / "report.json").read_text())
        assert {row["suite"] for row in report["rows"]} == suites
        named = {row["name"] for row in report["rows"]}
        assert {"static", "threshold", "draft-verify", "del", "swift", "conflayers", "wall-clock", "paper"} <= named
        assert {row["exact"] for row in report["rows"]} <= ({"yes", "ties"} if part == "greedy" else {"law"})
        ablated = json.loads((folder / "ablation" / "report.json").read_text())
        assert {row["suite"] for row in ablated["rows"]} == suites
        assert str(folder / "bench" / "report.md") in done.stdout
    runs = {path: path.stat().st_mtime_ns for path in out.rglob("runs.jsonl")}
    again = run(out, DRY_RUN="1", MODEL=str(model))
    assert again.returncode == 0, again.stderr[-3000:]
    assert "lede profile" not in again.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("runs.jsonl")} == runs


def test_what_is_missing_is_said_in_a_line(tmp_path: Path) -> None:
    missing = [
        run(tmp_path),
        run(tmp_path, TRAIN="train.jsonl"),
        run(tmp_path, DRY_RUN="1"),
        run(tmp_path, DRY_RUN="1", MODEL="no/such/folder"),
    ]
    said = ["set TRAIN", "set SUITES", "needs MODEL", "'no/such/folder' is no folder of a model"]
    for done, words in zip(missing, said, strict=True):
        assert done.returncode in (1, 2)
        assert done.stderr.startswith("layerskip_llama: ")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
    assert not list(tmp_path.iterdir())


def test_weights_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with pytest.raises(NotReadyError, match="holds no model"):
        weights(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert weights(str(tmp_path)) == (100, 0)

    class Hub:
        error: type[Exception] = OSError

        def auth_check(self, model: str) -> None:
            error = self.error.__new__(self.error)
            error.args = ("no route to host",)
            raise error

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    for error, words in (
        (GatedRepoError, "org/model is gated: accept its licence"),
        (RepositoryNotFoundError, "neither a folder nor a model of the hub"),
        (OSError, "cannot reach the weights of org/model: no route to host"),
    ):
        monkeypatch.setattr(Hub, "error", error)
        with pytest.raises(NotReadyError, match=words):
            weights("org/model")


def test_a_gpu_and_room_on_disk_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotReadyError, match="no CUDA GPU"):
        check_gpu(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10_000_000_000, 0))
    check_gpu(8_000_000_000)
    with pytest.raises(NotReadyError, match=r"10\.0 GB free, weights of 13\.5 GB need 16\.2 GB"):
        check_gpu(13_500_000_000)
    with pytest.raises(NotReadyError, match="are needed"):
        check_disk(tmp_path / "not" / "yet", 1 << 60)


def test_the_dry_runs_prompts_are_suites_that_share_nothing(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    train = {json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()}
    assert len(train) == 16
    for name in ("humaneval", "lm"):
        suite = load_suite(f"{name}:{tmp_path / name}.jsonl", tokenizer, validation_prompts=2)
        assert len(suite.test) == 6
        assert not train & {tokenizer.decode(list(item.ids)) for item in (*suite.test, *suite.validation)}


def test_the_script_runs_commands_that_there_are() -> None:
    called = {line.split()[1] for line in SCRIPT.read_text().splitlines() if line.strip().startswith("lede ")}
    assert called == {"collect", "profile", "train", "bench"}
    assert called <= set(COMMANDS)
