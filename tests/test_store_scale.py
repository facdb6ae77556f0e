"""The script that measures stores by size: its synthetic rollouts are sound, and its stages measure what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import store_scale, synthetic_store
from lede.learner import Learner

ROWS = 6000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scale")


def stage(folder: Path, name: Any) -> dict[str, Any]:
    settings = store_scale.ScaleSettings(
        folder, folder / "all.json", rows=(ROWS,), steps=12, batches=5, most_for_d3rlpy=ROWS, stage=name
    )
    return store_scale.main(settings)


def test_synthetic_rollouts_are_uniform_decisions() -> None:
    made = list(synthetic_store.rollouts(60_000))
    assert sum(rollout.n_rows for rollout in made) >= 60_000
    layers = np.concatenate([rollout.exit_layer[rollout.token_end] for rollout in made])
    shares = [float((layers == layer).mean()) for layer in (0, *synthetic_store.CANDIDATES)]
    assert shares == pytest.approx([1 / 9] * 9, abs=0.02)
    assert {rollout.token_index[-1] for rollout in made} == {synthetic_store.N_TOKENS - 1}
    exits = np.concatenate([rollout.actions for rollout in made]) == 1
    match = np.concatenate([rollout.match for rollout in made])
    entropy = np.concatenate([rollout.observations[:, 1] for rollout in made])
    assert set(match[~exits].tolist()) == {-1}
    assert match[exits & (entropy < 0.2)].mean() > 0.8 > 0.3 > match[exits & (entropy > 2)].mean()
    again = synthetic_store.rollout(made[3].prompt_index)
    np.testing.assert_array_equal(again.observations, made[3].observations)


def test_every_stage_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    update, sizes = Learner.update, {}
    for name in ("import", "write", "check", "load", "train", "batch"):
        sizes[name] = stage(folder, name)
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == sizes[name]
        assert sizes[name]["peak_bytes"] > 1e8
    assert Learner.update is update
    assert {sizes[name]["rows"] for name in ("write", "check", "load")} == {sizes["write"]["rows"]}
    assert ROWS <= sizes["write"]["rows"] < 1.1 * ROWS
    assert sizes["write"]["row_bytes"] == 31 * sizes["write"]["rows"]
    assert 0 < sizes["write"]["stored_bytes"] < sizes["write"]["row_bytes"]
    assert sizes["train"]["seconds"] > sizes["train"]["seconds_survey"] > 0
    assert sizes["batch"]["ratio"] > 0
    console = Console(width=200)
    with console.capture() as shown:
        console.print(store_scale.table({"sizes": {str(ROWS): sizes}}))
    assert "6,000" in shown.get()
    assert f"{sizes['batch']['theirs_ms']:.2f}" in shown.get()


def test_a_damaged_store_ends_the_stage(folder: Path) -> None:
    stage(folder, "write")
    victim = sorted((folder / f"{ROWS}.zarr" / "shards").rglob("c.0.0"))[0]
    victim.write_bytes(bytes([victim.read_bytes()[0] ^ 1]) + victim.read_bytes()[1:])
    with pytest.raises(ValueError, match="is damaged"):
        stage(folder, "check")
