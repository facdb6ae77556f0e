"""What a collection does with a model: settings, prompts and streams, ready to record any prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from lede.buffers import BRANCH_DEPTH, PromptRollout, PromptTrace, StoreSettings, prompts_digest
from lede.buffers.records import Record
from lede.checkpoint import fingerprint, versions
from lede.collectors.branches import BranchRules
from lede.collectors.config import DEFAULT_EPSILON, UNIFORM, CollectConfig
from lede.collectors.exploration import Explorer, parse_epsilon, policy_digest
from lede.collectors.rollout import collect_rollout
from lede.collectors.teacher import collect_teacher
from lede.envs import Rules
from lede.envs.episodes import PromptSource
from lede.features import FeatureConfig, parse_candidates
from lede.models import EarlyExitModel
from lede.policies import Policy, parse_policy
from lede.prompts import DEFAULT_PROMPTS, check_lengths, encode_prompts, load_prompts
from lede.rewards import RewardConfig
from lede.verification import Warp


@dataclass(frozen=True)
class Plan:
    """A collection on a loaded model. A prompt's content depends on the plan and its index alone.

    Every process of a collection makes the same one from the same settings.
    """

    config: CollectConfig
    """Settings."""
    model: EarlyExitModel
    """The model."""
    prompts: list[list[int]]
    """Token ids of the prompts, without repetitions by `cycle`."""
    episodes: int
    """Prompts in all."""
    rules: Rules
    """Candidates, budget, features, reward, warp."""
    explorer: Explorer | None
    """Who acts in a rollout; None for the teacher."""
    settings: StoreSettings
    """What the store is made with."""

    @classmethod
    def make(cls, config: CollectConfig, model: EarlyExitModel, prompts: PromptSource) -> Self:
        """Settle a collection before anything is written.

        Args:
            config: Settings.
            model: The model.
            prompts: Prompts, see `prompts_of`.

        Raises:
            ValueError: A setting doesn't fit the model or the prompts; the message names it.
        """
        ids = encode_prompts(model.tokenizer, prompts, config.chat)
        episodes = config.count_episodes(len(ids))
        check_lengths(ids[:episodes], config.max_new_tokens, model.max_positions)
        rules = Rules(
            parse_candidates(config.candidates, model.n_layers),
            config.max_new_tokens,
            FeatureConfig(),
            RewardConfig(final_reward=config.final_reward),
            Warp(config.temperature, config.top_k, config.top_p),
        )
        policy = _policy(config)
        explorer = None
        if config.collector == "rollout":
            epsilon = parse_epsilon(config.epsilon or DEFAULT_EPSILON)
            explorer = Explorer(model, rules, config.seed, policy, epsilon, episodes)
        settings = _settings(config, model, rules, ids, policy, episodes)
        return cls(config, model, ids, episodes, rules, explorer, settings)

    def records(
        self, indices: Sequence[int], on_tokens: Callable[[int], None] | None = None
    ) -> Iterator[PromptTrace | PromptRollout]:
        """Collect the prompts of these indices and yield each one's record when it is complete.

        Args:
            indices: Prompt indices; with `cycle` they go on past the number of prompts.
            on_tokens: Called with the number of new tokens whenever some were written.

        Raises:
            ValueError: A record holds NaN or infinity.
        """
        waiting = [(index, self.prompts[index % len(self.prompts)]) for index in indices]
        config = self.config
        if self.explorer is None:
            branching = BranchRules(config.branches, config.branch_depth)
            traces = collect_teacher(
                self.model, waiting, self.rules, config.seed, config.batch_size, on_tokens, branching
            )
            return map(self._checked, traces)
        rollouts = collect_rollout(
            self.model, waiting, self.rules, self.explorer, config.seed, config.batch_size, on_tokens
        )
        return map(self._checked, rollouts)

    def _checked(self, record: Record) -> Record:
        """The record; what a model that overflows gives is refused here, hours before training would refuse it."""
        values = {name: np.asarray(value) for name, value in vars(record).items()}
        odd = [name for name, value in values.items() if value.dtype.kind == "f" and not np.isfinite(value).all()]
        if odd:
            dtype = str(self.model.dtype).removeprefix("torch.")
            raise ValueError(
                f"prompt {record.prompt_index} (counted from 0): {', '.join(odd)} hold numbers that are not finite, so "
                f"the model's states or logits do in {dtype}. Check its weights, or collect with another dtype into "
                "another store: float16 overflows where bfloat16 and float32 do not"
            )
        return record


def prompts_of(config: CollectConfig) -> PromptSource:
    """The prompts that the settings name.

    Raises:
        ValueError: Their file can't be read.
    """
    return DEFAULT_PROMPTS if config.prompts is None else load_prompts(config.prompts)


def _policy(config: CollectConfig) -> Policy | None:
    if config.collector == "teacher" or config.explore == UNIFORM:
        return None
    policy = parse_policy(config.explore)
    if policy is None:
        raise ValueError("plain decoding never exits, so there is nothing to learn from; explore uniformly instead")
    return policy


def _settings(
    config: CollectConfig,
    model: EarlyExitModel,
    rules: Rules,
    ids: list[list[int]],
    policy: Policy | None,
    episodes: int,
) -> StoreSettings:
    rollout = config.collector == "rollout"
    explore, epsilon = config.explore, None
    if policy is not None:
        epsilon = parse_epsilon(config.epsilon or DEFAULT_EPSILON)
        if Path(config.explore).is_dir():
            explore += f" ({policy_digest(policy)})"  # the folder may come to hold another policy
        if epsilon[0] != epsilon[1]:
            explore += f" over {episodes} prompts"  # what epsilon a prompt gets depends on how many there are
    return StoreSettings(
        kind="transitions" if rollout else "traces",
        model=model.name,
        n_layers=model.n_layers,
        vocab_size=model.vocab_size,
        candidates=rules.candidates,
        fingerprint=fingerprint(model),
        features=rules.features,
        reward=rules.reward,
        seed=config.seed,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        explore=explore if rollout else None,
        epsilon=epsilon,
        prompts_digest=prompts_digest(ids),
        branch_share=0.0 if rollout else config.branches,
        branch_depth=BRANCH_DEPTH if rollout else config.branch_depth,
        chat=config.chat,
        versions=versions(),
    )
