"""The estimate of memory: what it says, and how near it is to what is held."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lede.buffers.store import open_store
from lede.memory_estimate import MemoryEstimate, estimate_memory
from lede.training import TrainConfig
from lede.training_data import load_data
from lede.wall_clock_data import WallClockData
from tests.lede import test_wall_clock as wall_clock
from tests.lede.test_training_run import SETTINGS
from tests.lede.test_windowed_training import PLAYED, TRACES, write


def estimate(buffer: str, processes: int = 1, validation: Any = None, **settings: Any) -> MemoryEstimate:
    store = open_store(buffer)
    config = TrainConfig(buffer=buffer, out="unused", **settings).settled(store.kind)
    return estimate_memory(config, store, validation, processes)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("played") / "a.zarr", PLAYED.settings, PLAYED, shard_prompts=10)


def test_it_says_what_is_held(played: str) -> None:
    rows = f"memory: {PLAYED.n_rows:,} decisions"
    assert str(estimate(played)) == f"{rows}, held whole: about 1 MB of data"
    assert str(estimate(played, window=1000)) == f"{rows}, read in windows of 1,000: about 1 MB of data"
    assert str(estimate(played, 4)).endswith("of data in each of 4 processes")
    sampled = MemoryEstimate(2_000_000, "traces", 524_288, 1_234_567_890, sampled=True)
    assert str(sampled) == "memory: 2,000,000 decided tokens, a sample of 524,288: about 1,235 MB of data"


def test_a_window_bounds_it(played: str) -> None:
    whole, windowed = (estimate(played, window=window).n_bytes for window in (10**6, 500))
    assert windowed < whole
    assert estimate(played, window=500, validation=TRACES).n_bytes >= windowed + TRACES.n_rows * 16 * 24


@pytest.mark.parametrize("kind", ["transitions", "traces"])
@pytest.mark.parametrize("window", [700, 10**6])
def test_it_is_near_what_is_held(kind: str, window: int, played: str, tmp_path: Path) -> None:
    buffer = played if kind == "transitions" else write(tmp_path / "a.zarr", SETTINGS, TRACES, shard_prompts=10)
    store = open_store(buffer)
    config = TrainConfig(buffer=buffer, out="unused", window=window, min_exits=1, holdout=0.5).settled(kind)
    told = estimate_memory(config, store).n_bytes
    load_data(config, open_store(buffer), None)  # once, so that what modules and caches take is there already
    tracemalloc.start()
    data = load_data(config, store, None)
    for held, rows in data.transitions.draw(None, 0, 256) if window == 700 else ():  # type: ignore[arg-type]  # windows draw by themselves
        held.batch(rows, 3, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.4 * peak < told < 2.5 * peak


def test_wall_clock_takes_a_sample_and_says_so(tmp_path: Path) -> None:
    rounds = wall_clock.store(60, 0)
    buffer = write(tmp_path / "a.zarr", rounds.settings, rounds, shard_prompts=5)
    profile = tmp_path / "profile.json"
    wall_clock.PROFILE.save(profile)
    settings: dict[str, Any] = {"profile": str(profile), "max_draft": 4, "features": wall_clock.PROBLEM.features.names}
    found, told = [], []
    for window in (1200, 10**6):
        config = TrainConfig(buffer=buffer, out="unused", window=window, holdout=0.0, **settings).settled("traces")
        store = open_store(buffer)
        told.append(estimate_memory(config, store))
        tracemalloc.start()
        data = load_data(config, store, None, wall_clock.PROFILE)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert isinstance(data, WallClockData)
        found.append(data.training.n_prompts)
        if window > 1200:
            assert 0.4 * peak < told[-1].n_bytes < 2.5 * peak
    assert found == [15, 60]  # three shards of 320 tokens are within 1,200
    assert "a sample of 1,200" in str(told[0])
    assert "held whole" in str(told[1])
    assert told[0].n_bytes < told[1].n_bytes / 2
