"""A collection from settings to store: `collect` is the program behind `lede collect`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console

from lede.buffers import BRANCH_DEPTH, PromptRollout, PromptTrace, StoreSettings, StoreWriter, prompts_digest
from lede.checkpoint import fingerprint, versions
from lede.collectors.branches import BranchRules
from lede.collectors.exploration import Explorer, parse_epsilon, policy_digest
from lede.collectors.progress import CollectProgress
from lede.collectors.rollout import NumberedPrompt, collect_rollout
from lede.collectors.teacher import collect_teacher
from lede.envs import Rules
from lede.envs.episodes import PromptSource
from lede.features import FeatureConfig, parse_candidates
from lede.models import EarlyExitModel, load_model
from lede.policies import Policy, parse_policy
from lede.prompts import DEFAULT_PROMPTS, Chat, check_lengths, encode_prompts, load_prompts
from lede.rewards import RewardConfig
from lede.stopwatch import Stopwatch
from lede.verification import Warp

Collector = Literal["rollout", "teacher"]

UNIFORM = "uniform"
"""Name of exploration without a policy."""

DEFAULT_EPSILON = "0.1"

DEFAULT_BRANCHES = BranchRules().share


@dataclass(frozen=True)
class CollectConfig:
    """Settings of a collection."""

    out: Path
    """Folder of the store, usually NAME.zarr; a store made with the same settings is continued."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    prompts: Path | None = None
    """Prompts, .jsonl or .txt; without it, a few heads of Python files."""
    collector: Collector = "rollout"
    """`rollout` acts and records transitions; `teacher` records every layer at every token (traces)."""
    episodes: int | None = None
    """Prompts, in file order, each once; without it, all."""
    max_new_tokens: int = 64
    """Budget of new tokens a prompt."""
    candidates: str | None = None
    """Candidate layers, as 2,4,8 or all; without it, multiples of ceil(L/8) up to L/2."""
    explore: str = UNIFORM
    """Who acts in a rollout: `uniform` over exit layers, or a policy (a folder, NAME, or NAME:key=value;key=value)."""
    epsilon: str | None = None
    """Share of tokens that explore in spite of the policy, START:END over the prompts; 0.1 unless given."""
    batch_size: int = 8
    """Prompts that share forward passes; does not change the content."""
    temperature: float = 0.0
    """Temperature of the target's text; 0 is greedy."""
    top_k: int | None = None
    """Tokens kept when sampling."""
    top_p: float | None = None
    """Probability mass kept when sampling."""
    seed: int = 0
    """Seed of every random stream, one a prompt and purpose."""
    device: str | None = None
    """Device of the model, such as cuda; the CPU unless given. Not used when a model object is passed."""
    dtype: str | None = None
    """Dtype of the weights, such as bfloat16. Not used when a model object is passed."""
    cycle: bool = False
    """Whether to go through the prompts again when there are more episodes than prompts."""
    chat: Chat = "auto"
    """Whether prompts go through the chat template; `auto` is on for prompts from `turns`."""
    branches: float = DEFAULT_BRANCHES
    """Share of wrong drafts from which the teacher rolls the drafter on, 0..1. A rollout has none."""
    branch_depth: int = BRANCH_DEPTH
    """Positions that are followed from a wrong draft, at most."""
    final_reward: float = 0.0
    """Added to the reward of the last continue of a token without an exit."""
    shard_prompts: int = 32
    """Prompts a shard; a killed run loses the shard it was at. Does not change the content."""

    def __post_init__(self) -> None:
        if self.collector not in get_args(Collector):
            raise ValueError(f"collector must be one of {', '.join(get_args(Collector))}, got '{self.collector}'")
        for name in ("episodes", "batch_size", "shard_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.collector == "teacher" and (self.explore != UNIFORM or self.epsilon is not None):
            raise ValueError("the teacher records every layer and acts nowhere; leave out explore and epsilon")
        BranchRules(self.branches, self.branch_depth)
        if self.collector == "rollout" and (
            self.branches not in (0, DEFAULT_BRANCHES) or self.branch_depth != BRANCH_DEPTH
        ):
            raise ValueError(
                "a rollout goes along the target's text and has no branches; leave out branches and branch_depth, or "
                "collect with the teacher"
            )
        if self.explore == UNIFORM and self.epsilon is not None:
            raise ValueError("uniform exploration has no epsilon; leave it out, or name a policy to explore around")
        if self.epsilon is not None:
            parse_epsilon(self.epsilon)


def collect(config: CollectConfig, model: EarlyExitModel | None = None, prompts: PromptSource | None = None) -> Path:
    """Fill a store with rollouts or traces, or go on filling it.

    Prompts that the store has are skipped, so running again with the same settings resumes; more `episodes` extend a
    store. Ctrl-C commits the prompts that are complete, says how to go on, and is raised on as KeyboardInterrupt (exit
    code 130 by custom).

    Args:
        config: Settings.
        model: A model to use instead of loading `config.model`.
        prompts: Prompts to use instead of `config.prompts`.

    Returns:
        The folder of the store.

    Raises:
        ValueError: A setting is out of range, there are too few prompts, or the store was made with other settings;
            the message names them.
    """
    model = load_model(config.model, config.device, config.dtype) if model is None else model
    if prompts is None:
        prompts = DEFAULT_PROMPTS if config.prompts is None else load_prompts(config.prompts)
    ids = encode_prompts(model.tokenizer, prompts, config.chat)
    episodes = len(ids) if config.episodes is None else config.episodes
    if episodes > len(ids) and not config.cycle:
        raise ValueError(f"{episodes} episodes need as many prompts, there are {len(ids)}; ask for fewer, or cycle")
    check_lengths(ids[:episodes], config.max_new_tokens, model.max_positions)
    rules = Rules(
        parse_candidates(config.candidates, model.n_layers),
        config.max_new_tokens,
        FeatureConfig(),
        RewardConfig(final_reward=config.final_reward),
        Warp(config.temperature, config.top_k, config.top_p),
    )
    policy = _policy(config)
    explorer = _explorer(config, model, rules, policy, episodes)
    settings = _settings(config, model, rules, ids, policy, episodes)
    console = Console()
    watch = Stopwatch(config.out)
    writer = StoreWriter.open(config.out, settings, shard_prompts=config.shard_prompts)
    n_before = n_done = len(writer.done)
    try:
        with writer, CollectProgress(episodes, sum(i < episodes for i in writer.done), console) as progress:
            waiting = [(i, ids[i % len(ids)]) for i in range(episodes) if i not in writer.done]
            for record in _records(config, model, waiting, rules, explorer, progress):
                writer.add(record)
                progress.prompt()
                if len(writer.done) > n_done:  # a shard was committed: its seconds are as safe as it is
                    n_done = len(writer.done)
                    watch.write()
    except KeyboardInterrupt:
        console.print(
            f"interrupted; {len(writer.done)} prompts are safe in {config.out}. "
            "Run the same command again to go on from there",
            highlight=False,
            soft_wrap=True,
        )
        raise
    finally:
        if len(writer.done) > n_before:
            watch.write()
    return config.out


def _records(
    config: CollectConfig,
    model: EarlyExitModel,
    waiting: Sequence[NumberedPrompt],
    rules: Rules,
    explorer: Explorer | None,
    progress: CollectProgress,
) -> Iterator[PromptTrace | PromptRollout]:
    if explorer is None:
        branching = BranchRules(config.branches, config.branch_depth)
        return collect_teacher(model, waiting, rules, config.seed, config.batch_size, progress.tokens, branching)
    return collect_rollout(model, waiting, rules, explorer, config.seed, config.batch_size, progress.tokens)


def _policy(config: CollectConfig) -> Policy | None:
    if config.collector == "teacher" or config.explore == UNIFORM:
        return None
    policy = parse_policy(config.explore)
    if policy is None:
        raise ValueError("plain decoding never exits, so there is nothing to learn from; explore uniformly instead")
    return policy


def _explorer(
    config: CollectConfig, model: EarlyExitModel, rules: Rules, policy: Policy | None, episodes: int
) -> Explorer | None:
    if config.collector == "teacher":
        return None
    return Explorer(model, rules, config.seed, policy, parse_epsilon(config.epsilon or DEFAULT_EPSILON), episodes)


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
