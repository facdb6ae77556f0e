"""Episodes over the rows of a walk: which prompt comes next, where an episode ends, what a step tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lede.envs.prompt_queue import PromptOrder as PromptOrder  # for the environments, beside EpisodeKind
from lede.envs.prompt_queue import PromptQueue
from lede.envs.rows import BETWEEN_TOKENS, Decision, Row, Rules
from lede.envs.walk import LayerWalk
from lede.features import FeatureConfig, parse_candidates
from lede.models import EarlyExitModel, load_model
from lede.prompts import DEFAULT_PROMPTS, Chat, Prompt, check_lengths, encode_prompts
from lede.rewards import RewardConfig
from lede.verification import Warp

EpisodeKind = Literal["token", "prompt"]
"""One generation step, or a whole prompt."""

ModelSource = EarlyExitModel | str | tuple[Any, Any]
"""A model, or what `lede.load_model` loads one from."""

PromptSource = Iterable[str | Prompt | Sequence[int]]
"""Texts, prompts of a file, or token ids."""

INFO_KEYS = ("prompt_index", "token_index", "layer", "exit_layer", "match", "target_token")


@dataclass(frozen=True)
class Outcome:
    """What one row's step came to."""

    reward: float
    """What the action earned."""
    terminated: bool
    """Whether the token was decided (token episodes) or the target wrote EOS (prompt episodes)."""
    truncated: bool
    """Whether the budget ended a prompt episode."""


class Episodes:
    """The decision process over `n_rows` rows; both environments are thin around it.

    Args:
        model: The model, or what to load it from.
        prompts: Prompts; None for `DEFAULT_PROMPTS`.
        candidates: Candidate layers as `lede.features.parse_candidates` takes them.
        max_new_tokens: Budget of new tokens a prompt.
        episode: One token or a whole prompt.
        features: What an observation is made of.
        reward: What a decision earns.
        temperature: Of the target's text; 0 is greedy.
        top_k: Tokens kept when sampling; None keeps all.
        top_p: Probability mass kept when sampling; None keeps all.
        order: Of the prompts.
        chat: Whether prompts go through the chat template.
        n_rows: Rows.

    Raises:
        ValueError: A setting is out of range, or a prompt and its budget exceed the model's positions.
    """

    def __init__(
        self,
        model: ModelSource,
        prompts: PromptSource | None,
        candidates: str | Sequence[int] | None,
        max_new_tokens: int,
        episode: EpisodeKind,
        features: FeatureConfig | None,
        reward: RewardConfig | None,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        order: PromptOrder,
        chat: Chat,
        n_rows: int,
    ) -> None:
        if episode not in get_args(EpisodeKind):
            raise ValueError(f"episode must be one of {', '.join(get_args(EpisodeKind))}, got '{episode}'")
        if n_rows < 1:
            raise ValueError(f"num_envs must be at least 1, got {n_rows}")
        self.model = model if isinstance(model, EarlyExitModel) else load_model(model)
        self.rules = Rules(
            parse_candidates(candidates, self.model.n_layers),
            max_new_tokens,
            features or FeatureConfig(),
            reward or RewardConfig(),
            Warp(temperature, top_k, top_p),
        )
        self.prompts = encode_prompts(self.model.tokenizer, DEFAULT_PROMPTS if prompts is None else prompts, chat)
        check_lengths(self.prompts, max_new_tokens, self.model.max_positions)
        self.episode = episode
        self.n_rows = n_rows
        self.observations = np.zeros((n_rows, len(self.rules.features.names)), dtype=np.float32)
        self.infos = {key: np.zeros(n_rows, dtype=np.int64) for key in INFO_KEYS}
        self.ended = np.ones(n_rows, dtype=np.bool_)  # rows whose next call must be `move_on`
        self._walk: LayerWalk | None = None
        self._queue = PromptQueue(len(self.prompts), order)

    @property
    def bounds(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Lowest and highest observation, `(feature,)` each."""
        return self.rules.features.bounds(self.model.n_layers, self.model.vocab_size)

    def start_over(self, rng: np.random.Generator, seed: int | None) -> None:
        """Forget everything and put every row at the start of a prompt.

        Args:
            rng: Orders the prompts.
            seed: Of the target's draws and the matches; None draws one from `rng`.
        """
        if self._walk is None:
            capacity = max(map(len, self.prompts)) + self.rules.max_new_tokens
            self._walk = LayerWalk(self.model, self.rules, self.n_rows, capacity)
        self._walk.seed = int(rng.integers(2**31)) if seed is None else seed
        self._queue.start_over()
        self._next_prompts(range(self.n_rows), rng)

    def move_on(self, rows: Sequence[int], rng: np.random.Generator) -> None:
        """Start the next episode of rows: the next token if the prompt has one and episodes are tokens, else a prompt.

        A token that is left undecided passes through the rest of the layers without an exit.
        """
        walk = self._started()
        stay = [r for r in rows if self.episode == "token" and not walk.row(r).done]
        walk.skip([r for r in stay if walk.row(r).candidate != BETWEEN_TOKENS])
        stay = [r for r in stay if not walk.row(r).done]
        walk.enter(stay)
        self._show(stay)
        self._next_prompts([r for r in rows if r not in stay], rng)

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Act on rows whose episode goes on; observations and infos change in place."""
        walk = self._started()
        decisions = walk.decide(actions)
        outcomes = {}
        entering = []
        for r, decision in decisions.items():
            row = walk.row(r)
            if self.episode == "token":
                terminated, truncated = decision.token_end, False
            else:
                terminated, truncated = row.ended_by_eos, row.done and not row.ended_by_eos
                if decision.token_end and not terminated:
                    entering.append(r)
            outcomes[r] = Outcome(decision.reward, terminated, truncated)
        walk.enter(entering)
        # a terminated episode has no next state: its last one stays in view
        self._show([r for r in decisions if not outcomes[r].terminated])
        for r, decision in decisions.items():
            self.ended[r] = outcomes[r].terminated or outcomes[r].truncated
            self._tell(r, decision)
        return outcomes

    def info(self, row: int) -> dict[str, Any]:
        """What is told beside the observation of one row."""
        return {key: int(values[row]) for key, values in self.infos.items()}

    def text(self, row: int) -> Row:
        """The prompt that a row stands in, and its text so far."""
        return self._started().row(row)

    def _started(self) -> LayerWalk:
        assert self._walk is not None, "reset comes before everything else"
        return self._walk

    def _next_prompts(self, rows: Iterable[int], rng: np.random.Generator) -> None:
        """Prefill rows with the next prompts; a prompt that the target ends at once has no decision and is passed."""
        walk, waiting = self._started(), list(rows)
        started, failures = list(waiting), 0
        while waiting:
            drawn = dict(zip(waiting, self._queue.take(len(waiting), rng).tolist(), strict=True))
            walk.prefill({r: (index, self.prompts[index % len(self.prompts)]) for r, index in drawn.items()})
            waiting = [r for r in waiting if walk.row(r).done]
            failures = failures + len(waiting) if len(waiting) == len(drawn) else 0
            if failures > 2 * len(self.prompts):  # in a row, so a whole pass is among them
                raise ValueError(
                    "the model ends every prompt at once, so there is nothing to decide; give other prompts"
                )
        walk.enter(started)
        self._show(started)

    def _show(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        walk = self._started()
        self.observations[rows] = walk.observe(rows)
        for r in rows:
            row = walk.row(r)
            self.ended[r] = False
            told = (row.prompt_index % len(self.prompts), row.token_index, walk.layer(r), 0, -1, -1)
            for key, value in zip(INFO_KEYS, told, strict=True):
                self.infos[key][r] = value

    def _tell(self, r: int, decision: Decision) -> None:
        self.infos["exit_layer"][r] = decision.exit_layer
        self.infos["match"][r] = decision.match
        self.infos["target_token"][r] = -1 if decision.target_token is None else decision.target_token
