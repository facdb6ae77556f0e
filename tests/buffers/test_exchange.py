"""`lede buffer export` and `import`: what goes through the files of others comes back value by value."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import lede.envs  # noqa: F401  # registers
from lede.buffers import StoreError, StoreWriter, TransitionStore, export_store, import_store, open_store, same_record
from lede.buffers.hdf5_file import ForgivingFile
from lede.cli import main
from lede.features import FeatureConfig
from lede.rewards import RewardConfig
from tests.buffers.foreign_stores import rollouts, store
from tests.buffers.samples import make_rollout, make_trace, settings

h5py = pytest.importorskip("h5py")  # comes with the extra `train`, or `minari`

NO_MINARI = pytest.mark.skipif(find_spec("minari") is None, reason="minari is not installed")
TARGETS = ["d3rlpy-h5", pytest.param("minari", marks=NO_MINARI)]


@pytest.fixture
def minari() -> Any:
    """Minari, where it is installed."""
    return pytest.importorskip("minari")


def outputs(path: Path) -> dict[str, Path]:
    return {"d3rlpy-h5": path / "code.h5", "minari": path / "code-v0"}


@pytest.mark.parametrize("episode", ["token", "prompt"])
@pytest.mark.parametrize("to", TARGETS)
def test_round_trip_is_exact(tmp_path: Path, to: Any, episode: Any) -> None:
    """A8.5: truncation, prompts without a decision and the last observation survive."""
    source = store(tmp_path / "r.zarr")
    out = outputs(tmp_path)[to]
    n = export_store(source, out, to, episode)
    assert n == (7 if episode == "token" else 4)
    assert import_store(out, str(tmp_path / "back.zarr")) == len(source)
    back = open_store(tmp_path / "back.zarr", verify=True)
    assert back.settings == source.settings
    assert back.prompt_indices == source.prompt_indices
    assert all(same_record(a, b) for a, b in zip(back, source, strict=True))  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([out.name, "back.zarr", "r.zarr"])


@pytest.mark.parametrize("to", TARGETS)
def test_a_store_without_prompts_comes_back(tmp_path: Path, to: Any) -> None:
    out = outputs(tmp_path)[to]
    assert export_store(TransitionStore(settings("transitions")), out, to) == 0
    assert import_store(out, str(tmp_path / "back.zarr")) == 0
    assert open_store(tmp_path / "back.zarr").settings == settings("transitions")


@pytest.mark.parametrize("to", TARGETS)
def test_relative_paths(tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = store(Path("r.zarr"))
    out = outputs(Path("sub"))[to]
    export_store(source, out, to)
    assert import_store(out, "back.zarr") == 6


@pytest.mark.parametrize("to", TARGETS)
def test_more_prompts_than_a_block(tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lede.buffers.companion.BLOCK_PROMPTS", 4)
    records = [make_rollout(i, ((1, 2), (), (3,))[i % 3], eos=i % 2 == 0) for i in range(11)]
    source = TransitionStore(settings("transitions"), records)
    out = outputs(tmp_path)[to]
    export_store(source, out, to)
    import_store(out, str(tmp_path / "back.zarr"))
    back = open_store(tmp_path / "back.zarr")
    assert all(same_record(a, b) for a, b in zip(back, records, strict=True))  # type: ignore[arg-type]


def test_minari_episodes_have_one_observation_more_and_say_how_they_ended(tmp_path: Path, minari: Any) -> None:
    """A8.5: T + 1 observations, the unfinished episode is truncated, none is empty."""
    out = tmp_path / "code-v0"
    export_store(store(tmp_path / "r.zarr"), out, "minari")
    data = minari.MinariDataset(out / "data")
    source = [rollout for rollout in rollouts() if rollout.n_rows]
    assert (data.total_episodes, data.total_steps) == (4, sum(rollout.n_rows for rollout in source))
    for episode, rollout in zip(data.iterate_episodes(), source, strict=True):
        n = rollout.n_rows
        assert n > 0
        last = rollout.observations[-1] if rollout.ended_by_eos else rollout.final_observation
        np.testing.assert_array_equal(episode.observations, np.vstack([rollout.observations, last]))
        np.testing.assert_array_equal(episode.rewards, rollout.rewards)
        np.testing.assert_array_equal(episode.actions, rollout.actions)
        assert episode.terminations.tolist() == [False] * (n - 1) + [rollout.ended_by_eos]
        assert episode.truncations.tolist() == [False] * (n - 1) + [not rollout.ended_by_eos]
        assert {len(values) for values in episode.infos.values()} == {n + 1}
        np.testing.assert_array_equal(episode.infos["layer"][:-1], rollout.layer)
        np.testing.assert_array_equal(episode.infos["match"][1:], rollout.match)
        assert set(episode.infos["prompt_index"]) == {rollout.prompt_index}


def test_minari_finds_the_data_set_and_what_it_was_made_with(
    tmp_path: Path, minari: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8.6: a reader needs nothing but the folder: spaces and the environment stand in the metadata."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    source = store(tmp_path / "r.zarr", model="demo", n_layers=12, vocab_size=8192, candidates=(2, 4))
    export_store(source, tmp_path / "sets" / "code-v0", "minari")
    assert list(minari.list_local_datasets()) == ["code-v0"]
    data = minari.load_dataset("code-v0")
    low, high = source.settings.features.bounds(12, 8192)
    assert data.observation_space == gymnasium.spaces.Box(low, high, dtype=np.float32)
    assert data.action_space == gymnasium.spaces.Discrete(2)
    assert data.env_spec is not None
    registered = gymnasium.spec("lede/LayerExit-v0")
    assert replace(data.env_spec, kwargs={}) == registered
    env = data.recover_environment()
    assert env.observation_space == data.observation_space
    assert env.unwrapped.episodes.rules.candidates == (2, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"features": FeatureConfig(names=("depth", "entropy", "trace", "margin"))},
        {"reward": RewardConfig(final_reward=1.0)},
    ],
)
def test_no_environment_is_named_that_would_be_another(tmp_path: Path, minari: Any, change: dict[str, Any]) -> None:
    export_store(store(tmp_path / "r.zarr", **change), tmp_path / "code-v0", "minari")
    assert minari.MinariDataset(tmp_path / "code-v0" / "data").env_spec is None
    import_store(tmp_path / "code-v0", str(tmp_path / "back.zarr"))
    assert open_store(tmp_path / "back.zarr").settings == open_store(tmp_path / "r.zarr").settings


@pytest.mark.parametrize("episode", ["token", "prompt"])
def test_d3rlpy_loads_the_file(tmp_path: Path, episode: Any) -> None:
    from lede.quiet_d3rlpy import import_d3rlpy

    if find_spec("d3rlpy") is None:
        pytest.skip("d3rlpy is not installed")
    d3rlpy = import_d3rlpy()
    source = store(tmp_path / "r.zarr")
    export_store(source, tmp_path / "code.h5", "d3rlpy-h5", episode)
    with (tmp_path / "code.h5").open("rb") as file:
        loaded = d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())
    assert loaded.dataset_info.action_size == 2
    expected = source.to_d3rlpy(episode=episode).episodes
    assert len(loaded.episodes) == len(expected)
    for got, wanted in zip(loaded.episodes, expected, strict=True):
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
            assert getattr(got, name).dtype == getattr(wanted, name).dtype
        assert got.terminated == wanted.terminated


def test_changed_rewards_are_taken_as_they_are_now(tmp_path: Path) -> None:
    export_store(store(tmp_path / "r.zarr"), tmp_path / "code.h5", "d3rlpy-h5", "prompt")
    with h5py.File(tmp_path / "code.h5", "a") as file:
        file["rewards_0"][...] = 7
    import_store(tmp_path / "code.h5", str(tmp_path / "back.zarr"))
    back = open_store(tmp_path / "back.zarr").arrays()
    assert (back["rewards"][back["prompt_index"] == 0] == 7).all()
    assert not (back["rewards"][back["prompt_index"] == 1] == 7).any()


def drop_last(file: Any) -> None:
    file["num_episodes"][()] = file["num_episodes"][()] - 1


def add_one(file: Any) -> None:
    n = file["num_episodes"][()]
    for name in ("observations", "actions", "rewards", "terminated"):
        file[f"{name}_{n}"] = file[f"{name}_0"][()]
    file["num_episodes"][()] = n + 1


def turn_end(file: Any) -> None:
    file["terminated_1"][()] = True


def lose_columns(file: Any) -> None:
    del file["lede/layer"]


def lose_group(file: Any) -> None:
    del file["lede"]


def lose_episode(file: Any) -> None:
    del file["rewards_2"]


def other_version(file: Any) -> None:
    del file["version"]
    file["version"] = "2.0"


def newer_schema(file: Any) -> None:
    made = json.loads(file["lede/settings"][()])
    del file["lede/settings"]
    file["lede/settings"] = json.dumps(made | {"schema_version": 99})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_last, "fewer episodes than were exported"),
        (add_one, "more than the 4 episodes that were exported"),
        (turn_end, "episode 1 has 4 decisions and is terminated, exported were 3 and truncated"),
        (lose_columns, "group 'lede' lacks layer"),
        (lose_group, "was not written by `lede buffer export`"),
        (lose_episode, "episode 2 can't be read"),
        (other_version, "version 2.1, its version is 2.0"),
        (newer_schema, "schema version 99, this lede reads"),
    ],
)
def test_what_was_changed_is_refused_and_nothing_is_left(tmp_path: Path, change: Any, message: str) -> None:
    export_store(store(tmp_path / "r.zarr"), tmp_path / "code.h5", "d3rlpy-h5", "prompt")
    with h5py.File(tmp_path / "code.h5", "a") as file:
        change(file)
    with pytest.raises(StoreError, match=message):
        import_store(tmp_path / "code.h5", str(tmp_path / "back.zarr"))
    assert not (tmp_path / "back.zarr").exists()


def test_a_minari_set_of_others_is_refused(tmp_path: Path, minari: Any) -> None:
    export_store(store(tmp_path / "r.zarr"), tmp_path / "code-v0", "minari")
    (tmp_path / "code-v0" / "data" / "lede.hdf5").unlink()
    with pytest.raises(StoreError, match=r"lacks data/lede.hdf5, so it was not written by `lede buffer export`"):
        import_store(tmp_path / "code-v0", str(tmp_path / "back.zarr"))
    with pytest.raises(StoreError, match="holds no data set of Minari"):
        import_store(tmp_path / "r.zarr", str(tmp_path / "back.zarr"))
    (tmp_path / "text").write_text("no data")
    with pytest.raises(StoreError, match="is no HDF5 file"):
        import_store(tmp_path / "text", str(tmp_path / "back.zarr"))
    with pytest.raises(StoreError, match="there is nothing at"):
        import_store(tmp_path / "nothing.h5", str(tmp_path / "back.zarr"))


@pytest.mark.parametrize("to", TARGETS)
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TransitionStore):
        def __iter__(self) -> Any:
            yield from rollouts()[:2]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_store(Broken(settings("transitions"), rollouts()), outputs(tmp_path)[to], to)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
@pytest.mark.parametrize(("limit", "block"), [(1000, 4), (1_060_000, 4), (200_000, 256)])
@pytest.mark.parametrize("to", TARGETS)
def test_a_full_disk_ends_an_export_and_leaves_nothing(
    tmp_path: Path, to: Any, limit: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HDF5 library would end the process when it can't write what it closes."""
    import resource

    monkeypatch.setattr("lede.buffers.companion.BLOCK_PROMPTS", block)
    source = TransitionStore(settings("transitions"), [make_rollout(i) for i in range(24)])
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            export_store(source, outputs(tmp_path)[to], to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_file_on_a_full_disk_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ForgivingFile(tmp_path / "f")
    file.write(b"0123456789")
    with FullFile(tmp_path / "f", "r+b") as full, monkeypatch.context() as patch:
        patch.setattr(file, "_file", full)
        file.seek(8)
        file.write(b"abcd")
        file.seek(14)
        file.write(b"ef")
        file.seek(3)
        file.write(b"x")
        assert (file.seek(0, os.SEEK_END), file.seek(0)) == (16, 0)
        assert file.read(20) == b"012x4567abcd\0\0ef\0\0\0\0"
        file.seek(9)
        assert file.read(2) == b"bc"
        with pytest.raises(OSError, match="No space left"):
            file.check()
    file.close()
    assert (tmp_path / "f").read_bytes() == b"0123456789"


class FullFile(io.FileIO):
    """A file on a disk that has room for nothing more."""

    def write(self, content: Any) -> int:
        raise OSError(28, os.strerror(28))


def test_what_can_not_be_exported_is_refused_before_any_work(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "t.zarr", settings()) as writer:
        writer.add(make_trace(0))
    with pytest.raises(ValueError, match="holds traces, in which nobody decided anything"):
        export_store(open_store(tmp_path / "t.zarr"), tmp_path / "code.h5", "d3rlpy-h5")  # type: ignore[arg-type]
    source = store(tmp_path / "r.zarr")
    with pytest.raises(ValueError, match="must be like code-v0"):
        export_store(source, tmp_path / "code", "minari")
    with pytest.raises(ValueError, match="to must be one of d3rlpy-h5, minari, got 'hdf5'"):
        export_store(source, tmp_path / "code.h5", "hdf5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="episode must be one of token, prompt, got 'round'"):
        export_store(source, tmp_path / "code.h5", "d3rlpy-h5", "round")  # type: ignore[arg-type]
    (tmp_path / "code.h5").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        export_store(source, tmp_path / "code.h5", "d3rlpy-h5")
    assert (tmp_path / "code.h5").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.h5", "r.zarr", "t.zarr"]


def test_by_command(tmp_path: Path, minari: Any, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path / "r.zarr")
    source, out, back = (str(tmp_path / name) for name in ("r.zarr", "code-v0", "back.zarr"))
    assert main(["buffer", "export", source, "--to", "minari", "--out", out]) == 0
    assert main(["buffer", "import", out, "--out", back]) == 0
    told = capsys.readouterr().out
    assert "4 episodes with 13 decisions" in told
    assert "6 prompts" in told
    assert main(["buffer", "import", out, "--out", back]) == 2
    assert "exists already" in capsys.readouterr().err
