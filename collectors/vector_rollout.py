"""Rollouts of any agent, recorded from outside through a vector environment.

A vector environment starts a row's next episode by itself, in the step after the end (next-step) or in the very step
that ended it (same-step). The first has a step that takes no action and earns nothing; the second hands out the new
episode's state where the old one's last belongs. Neither gets into a record here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from lede.buffers.records import PromptRollout
from lede.envs.episodes import Episodes
from lede.rewards import EXIT

Observations = npt.NDArray[np.float32]

Act = Callable[[Observations, dict[str, Any]], npt.NDArray[np.integer]]
"""Chooses actions `(row,)` for observations `(row, feature)` and the environment's infos."""

NEXT_STEP, SAME_STEP = "NEXT_STEP", "SAME_STEP"


def record_rollouts(
    env: gymnasium.vector.VectorEnv[Any, Any, Any], act: Act, n_prompts: int, seed: int | None = None
) -> Iterator[PromptRollout]:
    """Act in a vector environment and yield the transitions of prompts, for a `StoreWriter` or `TransitionStore`.

    Args:
        env: `lede/LayerExit-v0` with `episode="prompt"`, as `gymnasium.make_vec` makes it: lede's own vector
            environment, or single ones that gymnasium steps in turn (`vectorization_mode="sync"`).
        act: The agent. What it chooses for a row that is only being reset counts for nothing.
        n_prompts: Prompts to record. One that comes again in the same pass, as it does where every row has a queue of
            its own, is recorded once; one without any decision is passed over by the environment.
        seed: Of the environment's first reset.

    Raises:
        ValueError: The environment is another, its episodes are tokens, or it starts no episodes by itself.
    """
    if n_prompts < 1:
        raise ValueError(f"n_prompts must be at least 1, got {n_prompts}")
    mode, texts = _autoreset_mode(env), _texts(env)
    observations, infos = env.reset(seed=seed)
    logs = [_Log.begin(*text) for text in texts]
    over = np.zeros(env.num_envs, dtype=np.bool_)
    recorded: set[int] = set()
    while len(recorded) < n_prompts:
        seen, seen_infos = np.array(observations), {key: infos[key] for key in ("layer", "token_index")}
        actions = np.asarray(act(seen, infos))
        observations, rewards, terminated, truncated, infos = env.step(actions)
        for r in range(env.num_envs):
            if over[r]:  # this step only began the row's next episode
                logs[r] = _Log.begin(*texts[r])
                continue
            ended = bool(terminated[r] or truncated[r])
            told, state = infos, observations
            if ended and mode == SAME_STEP:  # what stands there now is the next episode's
                told, state = infos["final_info"], infos["final_obs"]
            step = {key: int(told[key][r]) for key in ("exit_layer", "match", "target_token")}
            step |= {key: int(values[r]) for key, values in seen_infos.items()}
            logs[r].add(seen[r], int(actions[r]), float(rewards[r]), step)
            if ended:
                log = logs[r]
                if log.prompt_index not in recorded and len(recorded) < n_prompts:
                    recorded.add(log.prompt_index)
                    yield log.record(bool(terminated[r]), np.array(state[r], dtype=np.float32))
                if mode == SAME_STEP:
                    logs[r] = _Log.begin(*texts[r])
        over = (terminated | truncated) if mode == NEXT_STEP else over


@dataclass
class _Log:
    """The transitions of one row's episode so far."""

    prompt_index: int
    prompt_ids: list[int]
    token_ids: list[int]
    observations: list[Observations] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    steps: list[dict[str, int]] = field(default_factory=list)

    @classmethod
    def begin(cls, episodes: Episodes, row: int) -> _Log:
        text = episodes.text(row)
        return cls(text.prompt_index, list(text.prompt_ids), list(text.token_ids))

    def add(self, observation: Observations, action: int, reward: float, step: dict[str, int]) -> None:
        self.observations.append(observation)
        self.actions.append(action)
        self.rewards.append(reward)
        self.steps.append(step)
        if step["target_token"] >= 0:
            self.token_ids.append(step["target_token"])

    def record(self, ended_by_eos: bool, state: Observations) -> PromptRollout:
        def column(name: str) -> npt.NDArray[Any]:
            return np.array([step[name] for step in self.steps])

        actions = np.array(self.actions)
        return PromptRollout(
            prompt_index=self.prompt_index,
            prompt_ids=np.array(self.prompt_ids),
            token_ids=np.array(self.token_ids),
            ended_by_eos=ended_by_eos,
            observations=np.array(self.observations),
            actions=actions,
            rewards=np.array(self.rewards),
            layer=column("layer"),
            exit_layer=np.where(actions == EXIT, column("exit_layer"), 0),
            token_index=column("token_index"),
            token_end=column("target_token") >= 0,
            match=column("match"),
            final_observation=self.observations[-1] if ended_by_eos else state,
        )


def _autoreset_mode(env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> str:
    """How an environment starts its next episodes; gymnasium 1.0 has one way and no name for it."""
    mode = env.metadata.get("autoreset_mode", NEXT_STEP)
    name = str(getattr(mode, "name", mode))
    if name not in (NEXT_STEP, SAME_STEP):
        raise ValueError(
            f"the environment's autoreset mode is {name}: rows would stay at their ends. Make it with next-step or "
            "same-step"
        )
    return name


def _texts(env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> list[tuple[Episodes, int]]:
    """Where each row's text is."""
    bare: Any = env.unwrapped
    own = getattr(bare, "episodes", None)
    if isinstance(own, Episodes):
        texts = [(own, r) for r in range(env.num_envs)]
    else:
        singles = [getattr(each.unwrapped, "episodes", None) for each in getattr(bare, "envs", ())]
        texts = [(each, 0) for each in singles if isinstance(each, Episodes)]
        if len(texts) != env.num_envs:
            raise ValueError(f"rollouts are recorded in lede/LayerExit-v0 in this process, got {bare}")
    if any(episodes.episode != "prompt" for episodes, _ in texts):
        raise ValueError("a record is a whole prompt: make the environment with episode='prompt'")
    return texts
