"""Settings of a collection, which are the options of `lede collect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.constructors import PrimitiveConstructorSpec

from lede.buffers import BRANCH_DEPTH
from lede.collectors.branches import BranchRules
from lede.collectors.exploration import parse_epsilon
from lede.prompts import Chat

Collector = Literal["rollout", "teacher"]

UNIFORM = "uniform"
"""Name of exploration without a policy."""

DEFAULT_EPSILON = "0.1"

DEFAULT_BRANCHES = BranchRules().share

ANY_CLUSTER = ""
"""Address of Ray's choice: that of the environment variable RAY_ADDRESS, or a cluster of this machine, made for it."""


def _address(words: list[str]) -> str:
    if len(words) > 1:
        raise ValueError(f"--ray takes one address at most, got {' '.join(words)}")
    return words[0] if words else ANY_CLUSTER


Address = Annotated[
    str | None,
    PrimitiveConstructorSpec[str | None](
        nargs="*",
        metavar="[ADDRESS]",
        instance_from_str=_address,
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: ["none" if value is None else value],
    ),
]
"""An option that may stand alone."""


@dataclass(frozen=True)
class CollectConfig:
    """Settings of a collection."""

    out: Path
    """Folder of the store, usually NAME.zarr, or its URL, such as s3://bucket/NAME.zarr; a store made with the same
    settings is continued."""
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
    pack_weights: bool = False
    """Pack the weights: float32 or bfloat16 on the CPU, for as much memory again; changes rounding alone. Not used when
    a model object is passed."""
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
    workers: int | None = None
    """Processes that collect, each with a model of its own, on the GPUs in turn when device is cuda; does not change
    the content. Without it, this process alone, or with ray one a GPU (with device cuda) or one a machine."""
    ray: Address = None
    """Collect on a Ray cluster: the address of a running one, or alone for RAY_ADDRESS or else this machine."""

    def __post_init__(self) -> None:
        if self.collector not in get_args(Collector):
            raise ValueError(f"collector must be one of {', '.join(get_args(Collector))}, got '{self.collector}'")
        for name in ("episodes", "batch_size", "shard_prompts", "workers"):
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

    @property
    def alone(self) -> bool:
        """Whether this process collects by itself, without workers."""
        return self.ray is None and self.workers in (None, 1)

    def count_episodes(self, n_prompts: int) -> int:
        """Prompts to collect, of a file of `n_prompts`.

        Raises:
            ValueError: There are too few.
        """
        episodes = n_prompts if self.episodes is None else self.episodes
        if episodes > n_prompts and not self.cycle:
            raise ValueError(
                f"{episodes} episodes need as many prompts, there are {n_prompts}; ask for fewer, or cycle (--cycle)"
            )
        return episodes
