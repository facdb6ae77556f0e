"""A store of transitions as a Minari data set, and back.

A data set is a folder `NAME-v0/data`; `minari.load_dataset("NAME-v0")` finds it where MINARI_DATASETS_PATH is the
folder above. Every episode has one observation more than it has actions: the state after the last decision. Where EOS,
or the end of a token, left no such state, the last one stands again, as the environment returns it. What Minari has no
place for lies beside its own file, in `data/lede.hdf5` (`lede.buffers.companion`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lede.buffers.companion import CompanionReader, CompanionWriter, ForeignEpisode, blocks
from lede.buffers.episode_cut import Cut, cut_episodes
from lede.buffers.hdf5_file import forgiving_file
from lede.buffers.records import PromptRollout, StoreError
from lede.buffers.settings import StoreSettings
from lede.buffers.store import Episodes
from lede.features import FeatureConfig
from lede.rewards import RewardConfig

if TYPE_CHECKING:
    import h5py
    from minari.data_collector import EpisodeBuffer

DATA = "data"
"""Folder of the data within a data set."""

COMPANION = "lede.hdf5"
"""File beside Minari's own."""

_NAME = re.compile(r"[-_\w]+-v\d+")
_ENV_ID = "lede/LayerExit-v0"
_ENV_MODULE = "lede.envs.layer_exit"


def check_name(folder: Path) -> None:
    """Raise ValueError unless Minari would find a data set in a folder of this name."""
    if not _NAME.fullmatch(folder.name):
        raise ValueError(
            f"Minari knows a data set by its folder's name, which must be like code-v0 (letters, digits, - and _, then "
            f"a version), got '{folder.name}'"
        )


def write_minari_folder(
    folder: Path, name: str, settings: StoreSettings, rollouts: Iterable[PromptRollout], episode: Episodes
) -> int:
    """Write rollouts as a data set.

    Its metadata hold the spaces and, where features and reward are the defaults, how to make the environment
    (`recover_environment`), since others can't be said in JSON. The infos of an episode are those of the environment:
    `prompt_index`, `token_index` and `layer` of each observation, `exit_layer`, `match` and `token_end` of the step
    that led there.

    Args:
        folder: The data set's folder; must be empty.
        name: What the data set is called.
        settings: Settings of the store.
        rollouts: Its prompts; one without a decision has no episode.
        episode: How they are cut. A prompt that EOS did not end is truncated.

    Returns:
        Number of episodes.

    Raises:
        OSError: The disk refused.
    """
    import h5py
    import minari
    from minari.dataset.minari_storage import MinariStorage
    from minari.serialization import deserialize_space

    folder = folder.absolute()  # Minari joins a relative path to itself
    low, high = settings.features.bounds(settings.n_layers, settings.vocab_size)
    box = {"type": "Box", "dtype": "float32", "shape": list(low.shape), "low": low.tolist(), "high": high.tolist()}
    storage = MinariStorage.new(
        folder / DATA,
        observation_space=deserialize_space(json.dumps(box)),
        action_space=deserialize_space(json.dumps({"type": "Discrete", "dtype": "int64", "start": 0, "n": 2})),
    )
    storage.update_metadata(
        {
            "dataset_id": name,
            "minari_version": minari.__version__,
            "algorithm_name": settings.explore or "unknown",
            "description": f"Early-exit decisions on {settings.model}, an episode a {episode}",
            **_environment(settings, episode),
        }
    )
    n = 0

    def written(companion: CompanionWriter) -> Iterator[EpisodeBuffer]:
        nonlocal n
        for block in blocks(rollouts):
            own.check()
            main.check()
            companion.add(block)
            for rollout in block:
                for cut in cut_episodes(rollout.token_end, rollout.ended_by_eos, episode):
                    yield _episode(rollout, cut, settings)
                    n += 1

    with (
        forgiving_file(storage._file_path) as main,
        forgiving_file(folder / DATA / COMPANION) as own,
        h5py.File(own, "w") as file,
    ):
        storage._file_path = main  # Minari opens it by this name
        storage.update_episodes(written(CompanionWriter(file, settings, episode)))
    return n


def open_companion(folder: Path) -> h5py.File:
    """The file beside a data set's own.

    Raises:
        StoreError: The folder holds no data set, or one that was not exported from a store.
    """
    import h5py

    path = folder / DATA / COMPANION
    if not (folder / DATA / "metadata.json").exists():
        raise StoreError(f"{folder} holds no data set of Minari: there is no {DATA}/metadata.json in it")
    if not path.exists():
        raise StoreError(
            f"{folder} lacks {DATA}/{COMPANION}, so it was not written by `lede buffer export`: which model, layers "
            "and texts its rows belong to is not known, and a store can't be made of it"
        )
    return h5py.File(path, "r")


def read_minari_folder(folder: Path, companion: h5py.File) -> tuple[StoreSettings, Iterator[PromptRollout]]:
    """Settings and rollouts of a data set; its companion must stay open while they are read.

    Raises:
        StoreError: The data set was changed after its export, or is from a newer lede.
    """
    reader = CompanionReader(companion, str(folder / DATA / COMPANION))
    return reader.settings, reader.rollouts(_episodes(folder))


def _environment(settings: StoreSettings, episode: Episodes) -> dict[str, str]:
    """The entry that tells how to make the environment, as gymnasium's own JSON; none where JSON can't say it."""
    if settings.features != FeatureConfig() or settings.reward != RewardConfig():
        return {}
    same = ("model", "max_new_tokens", "temperature", "top_k", "top_p", "chat")
    spec = {
        "id": _ENV_ID,
        "entry_point": f"{_ENV_MODULE}:LayerExitEnv",
        "vector_entry_point": f"{_ENV_MODULE}_vector:LayerExitVectorEnv",
        "kwargs": {
            **{name: getattr(settings, name) for name in same},
            "candidates": list(settings.candidates),
            "episode": episode,
        },
        "additional_wrappers": [],
    }
    return {"env_spec": json.dumps(spec)}


def _episode(rollout: PromptRollout, cut: Cut, settings: StoreSettings) -> EpisodeBuffer:
    from minari.data_collector import EpisodeBuffer

    rows, n = cut.rows, cut.end - cut.start
    last = rollout.observations[cut.end - 1] if cut.terminated else rollout.final_observation
    ends = np.zeros(n, dtype=np.bool_)
    ends[-1] = True
    nothing = np.zeros(n, dtype=np.bool_)
    token_index, layer = rollout.token_index[rows], rollout.layer[rows]
    # a truncated text stands at the first candidate of its next position
    next_token = token_index[-1] if cut.terminated else token_index[-1] + 1
    next_layer = layer[-1] if cut.terminated else settings.candidates[0]
    infos = {
        "prompt_index": np.full(n + 1, rollout.prompt_index, dtype=np.int64),
        "token_index": np.append(token_index, np.asarray(next_token, dtype=np.int32)),
        "layer": np.append(layer, np.asarray(next_layer, dtype=np.int16)),
        "exit_layer": np.concatenate([np.zeros(1, dtype=np.int16), rollout.exit_layer[rows]]),
        "match": np.concatenate([np.full(1, -1, dtype=np.int8), rollout.match[rows]]),
        "token_end": np.concatenate([np.zeros(1, dtype=np.bool_), rollout.token_end[rows]]),
    }
    values: dict[str, Any] = {
        "observations": np.concatenate([rollout.observations[rows], last[None]]),
        "actions": rollout.actions[rows].astype(np.int64),
        "rewards": rollout.rewards[rows],
        "terminations": ends if cut.terminated else nothing,
        "truncations": nothing if cut.terminated else ends,
        "infos": infos,
    }
    return EpisodeBuffer(**values)


def _episodes(folder: Path) -> Iterator[ForeignEpisode]:
    from minari.dataset.minari_storage import MinariStorage

    storage = MinariStorage.read(folder.absolute() / DATA)
    for episode in storage.get_episodes(range(storage.total_episodes)):
        observations: npt.NDArray[np.float32] = episode["observations"]
        terminated, truncated = bool(episode["terminations"][-1]), bool(episode["truncations"][-1])
        if len(observations) != len(episode["rewards"]) + 1 or terminated == truncated:
            raise StoreError(
                f"{folder}: episode {episode['id']} has {len(observations)} observations and {len(episode['rewards'])} "
                f"rewards, terminated {terminated}, truncated {truncated}; one observation more than rewards and one "
                "end are wanted"
            )
        # where there is no next state, the last observation stands twice and says nothing
        closing = None if terminated else observations[-1]
        yield ForeignEpisode(observations[:-1], episode["actions"], episode["rewards"], terminated, closing)
