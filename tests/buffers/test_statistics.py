"""`lede buffer info` counts what is there."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lede.buffers import StoreError, StoreWriter, info
from tests.buffers.samples import CANDIDATES, make_rollout, make_trace, settings, with_branches


def render(path: Path) -> list[str]:
    """The lines of the info as a terminal of 120 columns shows them."""
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(info(path))
    console.file.close()
    return console.export_text().splitlines()


def test_visits_and_agreement_of_transitions(tmp_path: Path) -> None:
    # tokens of 1, 2 and 3 decisions: exits at layers 1 and 2, then a full scan without an exit
    rollouts = [replace(make_rollout(i, (1, 2, 3), eos=i == 0), rewards=np.full(6, 0.5)) for i in range(4)]
    hits = [1, 1, 1, 0]
    rollouts = [
        replace(r, match=np.where(r.exit_layer == 1, hit, np.where(r.exit_layer == 2, 0, -1)))
        for r, hit in zip(rollouts, hits, strict=True)
    ]
    with StoreWriter.open(tmp_path / "r.zarr", settings("transitions"), shard_prompts=3) as writer:
        for rollout in rollouts:
            writer.add(rollout)
    found = info(tmp_path / "r.zarr", verify=True)
    assert [layer.layer for layer in found.layers] == list(CANDIDATES)
    assert [(layer.continues, layer.exits, layer.agreement) for layer in found.layers] == [
        (8, 4, 0.75),
        (4, 4, 0.0),
        (4, 0, None),
    ]
    assert (found.rows, found.prompts, found.tokens, found.ended_by_eos, found.unexited) == (24, 4, 16, 1, 4)
    assert found.mean_reward == 1.0
    assert (found.shards, found.duplicates, found.leftovers) == (2, 0, 0)


def test_agreement_of_traces_at_every_layer(tmp_path: Path) -> None:
    traces = [make_trace(i, sampled=True) for i in range(5)]
    with StoreWriter.open(tmp_path / "t.zarr", settings()) as writer:
        for trace in traces:
            writer.add(trace)
    found = info(tmp_path / "t.zarr")
    expected = np.concatenate([trace.match for trace in traces]).mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose([layer.agreement for layer in found.layers], expected, rtol=1e-12)  # type: ignore[arg-type]
    assert found.layers[-1].agreement == 1
    assert found.rows == sum(trace.n_rows for trace in traces)
    assert found.mean_reward is None


def test_branches_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    trace = with_branches(make_trace(0, n_tokens=9), 5)
    trace = replace(trace, branch_layer=np.array([2, 1, 2, 4, 2]), branch_length=np.array([1, 11, 2, 3, 4]))
    with StoreWriter.open(path, settings(branch_share=0.5)) as writer:
        writer.add(trace)
        writer.add(make_trace(1, n_tokens=3))
    found = info(path)
    assert [layer.branches for layer in found.layers] == [1, 3, 0, 1, 0, 0]
    assert (found.branches, found.mean_branch_length) == (5, 4.2)
    cells = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in render(path)]
    assert ["branches", "5 (mean length 4.2)"] in cells
    assert ["branch_share", "0.5"] in cells
    assert ["2", "3", f"{found.layers[1].agreement:.3f}"] in cells


def test_an_empty_store_has_no_agreement(tmp_path: Path) -> None:
    StoreWriter.open(tmp_path / "t.zarr", settings()).close()
    found = info(tmp_path / "t.zarr")
    assert (found.rows, found.prompts, {layer.agreement for layer in found.layers}) == (0, 0, {None})
    assert (found.branches, found.mean_branch_length) == (0, None)


def test_what_readers_pass_over_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    writers = [StoreWriter.open(path, settings()) for _ in range(2)]
    for writer in writers:
        writer.add(make_trace(0))
        writer.close()
    (path / "shards" / "half").mkdir()
    found = info(path)
    assert (found.prompts, found.duplicates, found.leftovers) == (1, 1, 1)
    assert any("1 repeated prompts passed over; 1 uncommitted passed over" in line for line in render(path))


def test_the_text_tells_layers_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "r.zarr"
    named = settings("transitions", model="some/[bold]model", seed=17, explore="uniform")
    with StoreWriter.open(path, named) as writer:
        writer.add(make_rollout(0, (1, 3)))
    lines = render(path)
    cells = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in lines]
    agreement = f"{make_rollout(0, (1, 3)).match[0]:.3f}"
    assert ["1", "2", "1", "1", agreement] in cells
    assert ["4", "1", "1", "0", "-"] in cells
    assert ["model", "some/[bold]model"] in cells
    assert ["seed", "17"] in cells
    assert ["tokens without exit", "1"] in cells


def test_the_numbers_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "r.zarr"
    with StoreWriter.open(path, settings("transitions")) as writer:
        writer.add(make_rollout(0, (1, 3)))
    back = json.loads(json.dumps(info(path).to_json()))
    assert back["layers"][0] == {
        "layer": 1,
        "continues": 1,
        "exits": 1,
        "agreement": int(make_rollout(0, (1, 3)).match[0]),
        "branches": 0,
    }
    assert back["settings"]["candidates"] == list(CANDIDATES)


def test_bytes_are_told_before_and_after_compression(tmp_path: Path) -> None:
    """Field by field: 4 features, reward, token index of 4 bytes; 2 layers of 2; action, match, token end of 1."""
    path = tmp_path / "r.zarr"
    with StoreWriter.open(path, settings("transitions"), shard_prompts=1) as writer:
        for i in range(2):
            writer.add(make_rollout(i))
    found = info(path)
    assert found.transition_bytes == 4 * 4 + 4 + 4 + 2 * 2 + 3 * 1 == 31
    assert found.stored_bytes == sum(file.stat().st_size for file in (path / "shards").rglob("*") if file.is_file())
    cells = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in render(path)]
    assert ["bytes a transition", "31 before compression"] in cells


def test_no_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        info(tmp_path / "nothing.zarr")
