"""Settings of a training run."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

from lede.features import FeatureConfig
from lede.lookup import Continuation, LookupConfig
from lede.training_sources import Sources, features_for

_PROCESS_FIELDS = ("out", "steps", "checkpoint_interval", "resume", "buffer", "validation", "profile")
"""Settings that a resumed run may change: they move no update. The data are compared by content."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; the fields are the flags of `lede train` and the content of config.json."""

    buffer: str
    """Store to learn from: transitions of a rollout, or traces, on which uniform decisions are played."""
    out: str
    """Folder of the run: policy/, config.json, checkpoints/, logs/."""
    validation: str | None = None
    """Store of traces of other prompts for the learning curve; None holds a part of the buffer out."""
    objective: Literal["paper", "wall-clock"] | None = None
    """What is maximised: the paper's reward, or tokens a second of the rounds that deployment runs; None for wall-clock
    where the buffer holds traces and a profile is given."""
    profile: str | None = None
    """Cost profile of `lede profile`; without one nobody knows what a second buys."""
    sources: Sources = "exit"
    """Where drafts may come from: layers of the model (exit), the text itself (lookup), or either, round by round;
    lookups need the wall-clock objective."""
    lookups: tuple[int, ...] = (2, 4, 8, 16)
    """Lengths of the drafts from the text to choose from, ascending."""
    prune_at: tuple[int, ...] = ()
    """Layers that may prune drafts from the text: each adds every length pruned there."""
    max_suffix: int | None = None
    """Longest end of the text that is searched for; None chooses by the simulated rate."""
    continuation: Continuation | None = None
    """What is copied of several earlier places, recent or frequent; None chooses by the simulated rate."""
    memory: str | None = None
    """Other texts to draft from where a text has nothing of its own: train for the buffer's, none, or a file of `lede
    phrases`; None for train where lookups are among the sources."""
    candidates: str | None = None
    """Candidate layers for a buffer of traces, such as 2,4,8 or all, or auto to search those that decode fastest by the
    profile; the store's unless given."""
    features: tuple[str, ...] | None = None
    """Features of the observation, for a buffer of traces; None for the store's, or those made for wall-clock."""
    draft_agreement: bool = False
    """Whether `agreement` is seen in the draft too, at the price of a second head read a token."""
    max_draft: int = 12
    """Most tokens drafted in a round."""
    fixed_lengths: tuple[int, ...] = ()
    """Lengths of drafts at each candidate that are made without asking, for wall-clock, ascending: where a decision is
    dear, as under compiled layers, they let the policy do as a static setting does."""
    algo: Literal["dqn", "double-dqn", "cql", "thresholds"] = "dqn"
    """Algorithm: d3rlpy's DQN, DoubleDQN or DiscreteCQL; or, for wall-clock, thresholds on a calibrated acceptance
    probability, searched on the simulator in seconds."""
    n_steps: int = 3
    """Most decisions in a return."""
    cut_at_greedy: bool = True
    """End a return before the first later decision that the target network would not make; unbiased that way."""
    steps: int | None = None
    """Updates in all; None for 5000, or 8000 with wall-clock."""
    batch_size: int = 256
    """Transitions in an update."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    hidden: tuple[int, ...] = (64, 64)
    """Units of the hidden layers, ReLU between them."""
    gamma: float = 1.0
    """Discount, per decision in token episodes and per token in prompt episodes."""
    target_update_interval: int = 50
    """Updates between two copies of the network into the target network."""
    averaging: float | None = None
    """Decay per update of the running average of the weights, which is what gets frozen; 0 freezes the last ones, None
    stands for 0.995, or 0.999 with wall-clock."""
    loss: Literal["squared", "huber"] = "squared"
    """Error of a value: squared, or d3rlpy's Huber loss, which is biased for rewards as far apart as these."""
    cql_alpha: float = 0.1
    """Weight of CQL's conservative term."""
    episode: Literal["token", "prompt", "round"] | None = None
    """What an episode is: a generation step as in the paper, a whole prompt, or with wall-clock a round, which prices
    what comes after it at the average; None for token, or with wall-clock prompt, or round where lookups or fixed
    drafts are chosen from: if lookups alone are, every choice is learned from at every state."""
    passes: int = 4
    """Times that uniform decisions are played on each trace; a buffer of transitions is taken as it is."""
    min_exits: int = 100
    """Exits that the buffer must hold at every candidate."""
    window: int = 524288
    """Rows of the buffer held in memory. A store on disk with more is read in windows, and each row drawn once an
    epoch; what is held out is then a share of a window. The wall-clock objective takes a sample of so many."""
    holdout: float = 0.1
    """Share of the buffer's prompts held out for the learning curve without a validation store; 0 scores on all."""
    explore: float = 0.3
    """Share of the rounds synthesised for wall-clock that follow a random plan; all of the first generation do."""
    flips: float = 0.03
    """Share of the policy's own decisions there that are replaced by a random one."""
    shaping: bool = True
    """Whether wall-clock pays an accepted draft where it is drafted, and tokens by the time that they take a
    clairvoyant: the same best policy, with far less noise."""
    refresh_interval: int = 1500
    """Updates between two generations of synthesised rounds; each plays the current policy and prices time by it."""
    generations: int = 4
    """Generations that are learned from at once."""
    branches: bool = True
    """Whether rounds follow recorded branches after a wrong draft."""
    keep: Literal["last", "best"] | None = None
    """Freeze the last policy, or the best on the curve by simulated speed (by reward without a profile, where on a few
    thousand tokens the best is mostly the luckiest); None for best with a profile and last without."""
    patience: int = 0
    """Points of the curve without a new best after which training stops early; 0 never does."""
    eval_interval: int = 500
    """Updates between two points of the learning curve."""
    checkpoint_interval: int = 500
    """Updates between two checkpoints."""
    seed: int = 0
    """Seed of weights, batches, played decisions and, without `split_seed`, what is held out."""
    split_seed: int | None = None
    """Seed of what is held out; None for `seed`. All runs of a sweep have its first seed: scores on other prompts don't
    compare."""
    device: str = "cpu"
    """Where the network is trained: cpu, cuda or cuda:N. So small a network is fastest on the CPU."""
    resume: bool = False
    """Go on from the last checkpoint in `out`, or start if there is none."""

    def __post_init__(self) -> None:
        counts = ("n_steps", "steps", "batch_size", "target_update_interval", "passes", "eval_interval", "max_draft")
        for name in (*counts, "checkpoint_interval", "refresh_interval", "generations", "window"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden must name the units of at least one layer, got {self.hidden}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be within (0, 1], got {self.gamma}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be a positive number, got {self.learning_rate}")
        if not self.lookups or list(self.lookups) != sorted(set(self.lookups)) or self.lookups[0] < 1:
            raise ValueError(f"lookups must be ascending lengths of at least 1, got {list(self.lookups)}")
        if list(self.fixed_lengths) != sorted(set(self.fixed_lengths) & set(range(1, self.max_draft + 1))):
            raise ValueError(
                f"fixed_lengths must be ascending lengths within 1..max_draft = {self.max_draft}, got "
                f"{list(self.fixed_lengths)}"
            )
        if self.max_suffix is not None:
            LookupConfig(self.max_suffix)  # complains of what it can't search for
        for name in ("explore", "flips"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within [0, 1], got {getattr(self, name)}")
        for name in ("averaging", "holdout"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be within [0, 1), got {getattr(self, name)}")
        for name in ("min_exits", "cql_alpha", "seed", "split_seed", "patience"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def settled(self, kind: str) -> TrainConfig:
        """The settings with every None that stands for a default replaced, for a buffer of this kind.

        Raises:
            ValueError: The objective does not fit the buffer, or a setting the objective.
        """
        traces = kind == "traces"
        if self.features is not None:
            FeatureConfig(names=self.features)  # complains of names that there are not
        objective = self.objective or ("wall-clock" if traces and self.profile else "paper")
        wall_clock = objective == "wall-clock"
        if wall_clock and not (traces and self.profile):
            lacking = "a cost profile (--profile, see `lede profile`)" if traces else "traces (--collector teacher)"
            raise ValueError(f"the wall-clock objective needs {lacking}; give it, or --objective paper")
        if not traces and (self.candidates or self.features or self.profile):
            raise ValueError("candidates, features and profile need a buffer of traces; rollouts have theirs recorded")
        if wall_clock and self.episode == "token":
            raise ValueError("the wall-clock objective has episodes of a prompt or a round, got 'token'")
        if not wall_clock and self.episode == "round":
            raise ValueError("episode 'round' belongs to the wall-clock objective; the paper's is 'token' or 'prompt'")
        if not wall_clock and self.algo == "thresholds":
            raise ValueError(
                "thresholds are searched for tokens a second: they need traces and a cost profile (--profile)"
            )
        if self.algo == "thresholds" and self.sources == "lookup" and self.prune_at:
            raise ValueError(
                "thresholds that draft from the text alone do not prune: leave out --prune-at, give --sources "
                "exit,lookup, or let dqn choose"
            )
        if wall_clock and self.gamma != 1:
            raise ValueError(
                f"the wall-clock objective has gamma 1: a second costs the same at any time; got {self.gamma}"
            )
        if not wall_clock and self.sources != "exit":
            raise ValueError(
                f"sources {self.sources} are chosen from by tokens a second: they need traces and a cost profile "
                "(--profile)"
            )
        if self.fixed_lengths and (not wall_clock or self.sources == "lookup" or self._weighs_sources):
            raise ValueError(
                "fixed_lengths are of drafts by layers that the pre-scan chooses: they need traces, a cost profile "
                "(--profile) and exit among the sources, alone for --algo thresholds"
            )
        memory = self._memory()
        names = self.features or (features_for(self.sources, memory != "none") if wall_clock else None)
        staged = wall_clock and self.sources != "lookup"
        missing = [name for name in ("in_scan", "in_draft") if staged and name not in (names or ())]
        if missing:
            raise ValueError(f"the wall-clock objective needs the features in_scan and in_draft; {missing} is missing")
        return replace(
            self,
            objective=objective,
            steps=self.steps or (8000 if wall_clock else 5000),
            averaging=(0.999 if wall_clock else 0.995) if self.averaging is None else self.averaging,
            episode=self.episode or (_wall_clock_episode(self.sources, self.fixed_lengths) if wall_clock else "token"),
            n_steps=1 if self.sources == "lookup" and self.episode in (None, "round") else self.n_steps,
            keep=self.keep or ("best" if self.profile else "last"),
            features=names,
            memory=memory,
        )

    @property
    def splits_by(self) -> int:
        """Seed of what is held out, and of the sample that it is held out of."""
        return self.seed if self.split_seed is None else self.split_seed

    @property
    def _weighs_sources(self) -> bool:
        """Whether thresholds weigh one source against the other."""
        return self.algo == "thresholds" and self.sources != "exit"

    def _memory(self) -> str:
        """What `memory` stands for.

        Raises:
            ValueError: Nobody would draft from it.
        """
        if self.sources == "exit" and self.memory not in (None, "none"):
            raise ValueError(
                f"memory {self.memory} is drafted from by lookups: give --sources lookup or exit,lookup, or leave the "
                "memory out"
            )
        return self.memory or ("none" if self.sources == "exit" else "train")


def _wall_clock_episode(sources: Sources, fixed_lengths: tuple[int, ...]) -> Literal["prompt", "round"]:
    """Rounds where the text drafts too, or drafts of fixed lengths do.

    Over a whole prompt, values of later rounds are learned from values of still later ones, each the largest of as many
    plans as there are, and nothing that is observed says how much text is left: errors add up, and the loss explodes.
    """
    return "prompt" if sources == "exit" and not fixed_lengths else "round"


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that a resumed run must share, as JSON values."""
    values = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _PROCESS_FIELDS}
    return dict(json.loads(json.dumps(values)))


def with_defaults(then: dict[str, Any]) -> dict[str, Any]:
    """The fixed settings of an earlier run, with the default where it knew no such setting."""
    defaults = {each.name: each.default for each in fields(TrainConfig) if each.default is not MISSING}
    defaults = {name: value for name, value in defaults.items() if name not in _PROCESS_FIELDS}
    defaults["memory"] = "none"  # whoever does not say so was trained before there was one
    return {**dict(json.loads(json.dumps(defaults))), **then}


def as_json(config: TrainConfig) -> dict[str, Any]:
    """All settings as JSON values."""
    return dict(json.loads(json.dumps(asdict(config))))
