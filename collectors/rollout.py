"""Rollouts: an actor decides in the live process, and its transitions are recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lede.buffers.records import PromptRollout
from lede.collectors.exploration import Actor, Explorer
from lede.envs import Decision, LayerWalk, Rules
from lede.models import EarlyExitModel
from lede.rewards import CONTINUE, EXIT

NumberedPrompt = tuple[int, Sequence[int]]
"""Prompt index and token ids."""


def collect_rollout(
    model: EarlyExitModel,
    prompts: Sequence[NumberedPrompt],
    rules: Rules,
    explorer: Explorer,
    seed: int = 0,
    batch_size: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[PromptRollout]:
    """Act on prompts, `batch_size` of them at a time, and yield each one's transitions when its text ends.

    Every prompt has random streams of its own, so its record doesn't depend on the batch or the order: tokens, actions,
    matches and rewards are the same, float features agree to rounding.

    Args:
        model: The model.
        prompts: Prompt index and token ids; the index names the streams.
        rules: Candidates, budget, features, reward, warp.
        explorer: Who acts.
        seed: Of the target's draws and the matches.
        batch_size: Prompts that share forward passes.
        on_tokens: Called with the number of new tokens whenever some were written.
    """
    queue = deque(prompts)
    n_rows = min(batch_size, len(queue))
    if not queue:
        return
    capacity = max(len(ids) for _, ids in prompts) + rules.max_new_tokens
    walk = LayerWalk(model, rules, n_rows, capacity, seed)
    active: dict[int, _Log] = {}
    while queue or active:
        free = [r for r in range(n_rows) if r not in active]
        drawn = {r: queue.popleft() for r in free[: len(queue)]}
        walk.prefill(drawn)
        active.update({r: _Log(explorer.actor(index)) for r, (index, _) in drawn.items()})
        walk.enter(r for r in drawn if not walk.row(r).done)
        standing = {r: log for r, log in active.items() if not walk.row(r).done}
        _decide_token(walk, standing)
        # the budget's end has a next state, EOS has none
        walk.enter(r for r in standing if not walk.row(r).ended_by_eos)
        if on_tokens is not None:
            on_tokens(len(drawn) + len(standing))
        for r in [r for r in active if walk.row(r).done]:
            yield active.pop(r).record(walk, r)


def _decide_token(walk: LayerWalk, logs: Mapping[int, _Log]) -> None:
    """Take rows that stand at their first candidate through the decisions of one token.

    Rows that leave wait for the others and finish with them, so that a layer runs once a token for all rows, and twice
    at most where some had left and others went on.
    """
    standing = list(logs)
    leaving: dict[int, int] = {}
    for last in [*[False] * (len(walk.rules.candidates) - 1), True]:
        actions = {r: logs[r].actor.act(walk.row(r), walk.layer(r)) for r in standing}
        for r, observation in zip(standing, walk.observe(standing), strict=True):
            logs[r].observations.append(observation)
        leaving.update({r: action for r, action in actions.items() if last or action == EXIT})
        standing = [r for r in standing if r not in leaving]
        for r, decision in walk.decide(dict.fromkeys(standing, CONTINUE)).items():
            logs[r].add(decision)
    for r, decision in walk.decide(leaving).items():
        logs[r].add(decision)


@dataclass
class _Log:
    """The transitions of one prompt so far."""

    actor: Actor
    observations: list[npt.NDArray[np.float32]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def add(self, decision: Decision) -> None:
        self.actor.learn(decision)
        self.decisions.append(decision)

    def record(self, walk: LayerWalk, index: int) -> PromptRollout:
        row, decisions = walk.row(index), self.decisions
        n_features = len(walk.rules.features.names)
        return PromptRollout(
            prompt_index=row.prompt_index,
            prompt_ids=np.array(row.prompt_ids),
            token_ids=np.array(row.token_ids),
            ended_by_eos=row.ended_by_eos,
            observations=np.array(self.observations, dtype=np.float32).reshape(-1, n_features),
            actions=np.array([d.action for d in decisions]),
            rewards=np.array([d.reward for d in decisions]),
            layer=np.array([d.layer for d in decisions]),
            exit_layer=np.array([d.exit_layer for d in decisions]),
            token_index=np.array([d.token_index for d in decisions]),
            token_end=np.array([d.token_end for d in decisions]),
            match=np.array([d.match for d in decisions]),
            final_observation=self._final_observation(walk, index),
        )

    def _final_observation(self, walk: LayerWalk, index: int) -> npt.NDArray[np.float32]:
        row = walk.row(index)
        if not row.ended_by_eos:
            last: npt.NDArray[np.float32] = walk.observe([index])[0]
            return last
        if self.observations:
            return self.observations[-1]
        # the first token was EOS: nothing was looked at
        values = {"trace": row.trace.value(), "depth": walk.rules.candidates[0] / walk.model.n_layers}
        return walk.rules.features.observe(values, walk.model.n_layers, walk.model.vocab_size)
