"""kill -9 in the middle of a collection, at random file operations, loses nothing that was committed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lede.buffers import open_store
from lede.collectors import CollectConfig, collect
from tests.tiny_models import prompt, tiny_model

KILLS = {"rollout": (23, 131, 78), "teacher": (97, 5, 140)}
"""File operations in the store at which successive runs die."""

PROMPTS = [prompt(i, 4 + i % 3) for i in range(12)]

# Forks a process for every COLLECTOR:N, which kills itself at its Nth file operation in the store.
SCRIPT = """
import os, signal, sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.collectors.test_kill import collect_into

def die(folder, kill_at):
    count = 0
    def watch(event, args):
        nonlocal count
        if event in ("open", "os.rename") and str(folder) in str(args[0]):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

for text in sys.argv[2:]:
    collector, kill_at = text.split(":")
    folder = Path(sys.argv[1]) / collector
    child = os.fork()
    if child == 0:
        die(folder, int(kill_at))
        collect_into(folder, collector)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


def collect_into(folder: Path, collector: Any) -> None:
    explore = "random" if collector == "rollout" else "uniform"
    settings: dict[str, Any] = {"max_new_tokens": 8, "batch_size": 3, "shard_prompts": 2, "seed": 5}
    settings |= {"temperature": 0.7, "top_k": 3}  # few tokens, so that layers differ in them
    if collector == "teacher":
        settings["branches"] = 0.5
    config = CollectConfig(folder, collector=collector, explore=explore, **settings)
    collect(config, tiny_model("llama"), PROMPTS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of both collectors, left by three processes each that were killed."""
    folder = tmp_path_factory.mktemp("killed")
    runs = [f"{collector}:{kill_at}" for collector, kills in KILLS.items() for kill_at in kills]
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), *runs], cwd=Path(__file__).parents[2], check=True)
    return folder


@pytest.mark.parametrize(
    ("collector", "same", "close"),
    [
        ("rollout", ("actions", "rewards", "layer", "exit_layer", "token_end", "match"), ("observations",)),
        (
            "teacher",
            ("token", "branch_row", "branch_layer", "branch_length", "branch_token"),
            ("confidence", "entropy", "top1", "closing_entropy", "branch_confidence", "branch_top2"),
        ),
    ],
)
def test_killed_three_times_and_resumed_equals_uninterrupted(
    killed: Path, tmp_path: Path, collector: str, same: tuple[str, ...], close: tuple[str, ...]
) -> None:
    assert len(open_store(killed / collector, verify=True)) < len(PROMPTS)
    collect_into(killed / collector, collector)
    collect_into(tmp_path / "whole", collector)
    resumed, whole = open_store(killed / collector, verify=True), open_store(tmp_path / "whole")
    assert resumed.prompt_indices == whole.prompt_indices == tuple(range(len(PROMPTS)))
    assert resumed.duplicates == 0
    found: list[Any] = list(resumed)
    wanted: list[Any] = list(whole)
    assert collector == "rollout" or sum(trace.n_branches for trace in wanted) > len(PROMPTS)
    for a, b in zip(found, wanted, strict=True):
        for name in ("prompt_ids", "token_ids", *same):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        for name in close:
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-4, err_msg=name)
