"""The learning curve: what the greedy policy is worth on text that it was not trained on, while it is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from lede.atomic import write_atomically
from lede.rewards import EXIT

if TYPE_CHECKING:
    from lede.buffers.records import PromptRollout, PromptTrace
    from lede.buffers.settings import StoreSettings
    from lede.transitions import Greedy


@dataclass(frozen=True)
class GreedyScore:
    """What the greedy policy does per token."""

    reward: float
    """Mean reward of a token, expected where sampled; for wall-clock 1 - price of a second / tokens a second."""
    acceptance: float | None
    """Share of exits whose token the target confirms; None when it never exits."""
    exit_layer: float | None
    """Mean exit layer over the exits; None when it never exits."""
    exit_rate: float
    """Share of tokens that exit at all; for wall-clock, share of rounds."""
    n_tokens: int
    """Tokens that the figures rest on."""
    speedup: float | None = None
    """Simulated tokens per second over plain decoding's; None without a cost profile."""
    draft_length: float | None = None
    """Mean tokens drafted in the rounds that drafted; None without a cost profile."""
    exits: dict[str, float] = field(default_factory=dict)
    """Share of rounds by exit layer, 0 for plain passes; empty without a cost profile."""
    regret: dict[str, float] = field(default_factory=dict)
    """Tokens a token lost against the clairvoyant choice, by cause; empty without a cost profile."""
    sources: dict[str, float] = field(default_factory=dict)
    """Share of rounds by source of the draft (see `lede.round_log.SOURCES`); empty without a cost profile."""
    q_error: float | None = None
    """Value that the network gives its own rounds minus what they earn, in tokens a round; None without a profile."""

    @property
    def merit(self) -> float:
        """What checkpoints are chosen by: the speedup, or the reward where nobody knows what a second buys."""
        return self.reward if self.speedup is None else self.speedup


@dataclass(frozen=True)
class CurvePoint:
    """The learner at one step."""

    step: int
    """Updates so far."""
    loss: float | None
    """Mean loss since the point before; None at the start."""
    q_continue: float
    """Mean value of going on, over a fixed set of training states."""
    q_exit: float
    """Mean value of exiting, over the same states; where no layer drafts, of the first lookup."""
    score: GreedyScore
    """The greedy policy on the evaluation text."""


def score_on_traces(traces: Sequence[PromptTrace], settings: StoreSettings, greedy: Greedy) -> GreedyScore:
    """Play the greedy policy on traces: exact, since a trace holds every layer.

    Args:
        traces: Full information, one a prompt.
        settings: Candidates, features and reward that the policy is trained with.
        greedy: Actions `(row,)` for observations `(row, feature)`.
    """
    from lede.buffers.playback import play

    rewards, n_tokens = 0.0, 0
    matches, layers = [np.zeros(0)], [np.zeros(0)]
    for trace, played in zip(traces, play(traces, greedy, settings), strict=True):
        exits = played.actions == EXIT
        layer = played.exit_layer[exits].astype(np.int64)
        match = trace.match[played.token_index[exits] - 1, layer - 1]
        rewards += float(played.rewards[~exits].sum(dtype=np.float64))
        rewards += float(settings.reward.exit(layer, settings.n_layers, match).sum(dtype=np.float64))
        matches.append(match)
        layers.append(layer)
        n_tokens += trace.n_decided
    return _score(rewards, np.concatenate(matches), np.concatenate(layers), n_tokens)


def score_on_rollouts(rollouts: Sequence[PromptRollout], greedy: Greedy) -> GreedyScore:
    """Score the greedy policy on the tokens of which every recorded decision is the greedy one.

    Unbiased up to the confidence trace, which comes from the recorded decisions, if the exit layer (or none) was drawn
    uniformly: then every course of a token is as likely to be recorded. Under another behaviour it is only a hint.
    """
    rewards, n_tokens = 0.0, 0
    matches, layers = [np.zeros(0)], [np.zeros(0)]
    for rollout in rollouts:
        if not rollout.n_rows:
            continue
        agrees = np.asarray(greedy(rollout.observations)) == rollout.actions
        starts = np.flatnonzero(np.concatenate(([True], rollout.token_end[:-1])))
        kept = np.logical_and.reduceat(agrees, starts)
        rewards += float(np.add.reduceat(rollout.rewards.astype(np.float64), starts)[kept].sum())
        exits = rollout.token_end & (rollout.actions == EXIT)
        exits[rollout.token_end] &= kept
        matches.append(rollout.match[exits])
        layers.append(rollout.exit_layer[exits])
        n_tokens += int(kept.sum())
    return _score(rewards, np.concatenate(matches), np.concatenate(layers), n_tokens)


def _score(rewards: float, match: npt.NDArray[Any], layer: npt.NDArray[Any], n_tokens: int) -> GreedyScore:
    exited = match.size > 0
    return GreedyScore(
        reward=rewards / n_tokens if n_tokens else 0.0,
        acceptance=float(match.mean(dtype=np.float64)) if exited else None,
        exit_layer=float(layer.mean(dtype=np.float64)) if exited else None,
        exit_rate=match.size / n_tokens if n_tokens else 0.0,
        n_tokens=n_tokens,
    )


def read_curve(path: Path) -> list[CurvePoint]:
    """The points of a `learning_curve.jsonl`, in order; none when there is no file."""
    if not path.exists():
        return []
    points = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        points.append(CurvePoint(**{**values, "score": GreedyScore(**values["score"])}))
    return points


class LearningCurve:
    """Points kept in `learning_curve.jsonl` and shown in TensorBoard.

    Args:
        folder: Where both are written.
        resumed: Points to go on from; later ones of an earlier run are dropped from the file and hidden in TensorBoard.
        writes: Whether anything is written; of several processes only one does.
    """

    def __init__(self, folder: Path, resumed: Sequence[CurvePoint] = (), writes: bool = True) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.points = list(resumed)
        self._path = folder / "learning_curve.jsonl"
        purge_step = self.points[-1].step + 1 if self.points else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge_step) if writes else None

    def add(self, point: CurvePoint) -> None:
        """Record a point."""
        self.points.append(point)
        if self._writer is None:
            return
        write_atomically(self._path, "".join(json.dumps(asdict(each)) + "\n" for each in self.points).encode())
        values = {
            "train/loss": point.loss,
            "train/q_continue": point.q_continue,
            "train/q_exit": point.q_exit,
            "greedy/reward": point.score.reward,
            "greedy/acceptance": point.score.acceptance,
            "greedy/exit_layer": point.score.exit_layer,
            "greedy/exit_rate": point.score.exit_rate,
            "greedy/speedup": point.score.speedup,
            "greedy/draft_length": point.score.draft_length,
            "train/q_error": point.score.q_error,
            **{f"exits/layer_{int(layer):02d}": share for layer, share in point.score.exits.items()},
            **{f"sources/{source}": share for source, share in point.score.sources.items()},
            **{f"regret/{cause.replace(' ', '_')}": lost for cause, lost in point.score.regret.items()},
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, point.step)
        self._writer.flush()

    def __enter__(self) -> Self:
        """The curve itself; leaving closes its files."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
