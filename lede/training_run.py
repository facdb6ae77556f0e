"""One training run: batches, updates, points of the curve and checkpoints, from any step on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lede.checkpoint import versions
from lede.learner import Learner
from lede.learning_curve import CurvePoint, GreedyScore, LearningCurve, read_curve
from lede.policies.base import BLIND
from lede.policies.learned import LearnedPolicy
from lede.processes import ALONE, Processes
from lede.q_network import Layers
from lede.rewards import CONTINUE, EXIT
from lede.run_folder import RunFolder
from lede.seeding import Purpose, numpy_stream, torch_stream
from lede.stopwatch import Stopwatch
from lede.training_config import TrainConfig, as_json, fixed_settings
from lede.training_data import TrainingData
from lede.transitions import NStepBatch
from lede.wall_clock_data import WallClockData

N_PROBE = 1024
"""Training states whose mean values the curve shows."""


class TrainingRun:
    """A run that can be left at a checkpoint and gone on with to the same result, bit for bit on a CPU.

    Args:
        config: All settings.
        data: Transitions and what to score on.
        folder: Where checkpoints and the curve go.
        saved: A checkpoint to go on from; None starts anew.
        watch: Runs since the run was asked for; None for from now on.
        processes: Those that train together; None for this one alone.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData | WallClockData,
        folder: RunFolder,
        saved: dict[str, Any] | None = None,
        watch: Stopwatch | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._processes = processes or ALONE
        self.config, self.data, self.folder = config, data, folder
        self._watch = watch or Stopwatch(folder.path)
        self.step = 0
        self._rng = numpy_stream(config.seed, Purpose.TRAINING)
        seed = torch_stream(config.seed, Purpose.TRAINING).initial_seed()
        self.learner = Learner(
            config, data.mean, data.std, seed, data.n_actions, data.stage_flags, data.scans, processes
        )
        self._losses: list[float] = []  # since the last point of the curve
        self._best: dict[str, Any] | None = None
        self._steps = config.steps or 0
        self._probe = data.transitions.probe(N_PROBE)
        if saved is not None:
            self.step = saved["step"]
            self._rng.bit_generator.state = json.loads(saved["rng"])
            self._losses = list(saved["losses"])
            self._best = saved["best"]
            self.learner.load_state(saved["learner"])
            data.load_state(saved["data"], self._policy_of)

    def learn(self, progress: bool = True) -> None:
        """Update until `config.steps`.

        Raises:
            ValueError: The loss became infinite or NaN.
        """
        config, begin = self.config, self.step
        # a point off the grid was the last of a run that ended there
        known = read_curve(self.folder.curve) if self.step else []
        resumed = [point for point in known if point.step <= self.step and not point.step % config.eval_interval]
        with (
            LearningCurve(self.folder.logs, resumed, self.folder.writes) as curve,
            _Display(self._steps, self.step, progress and self.folder.writes, str(self.folder.path)) as display,
        ):
            if not curve.points:
                display.point(self._point(curve))
            while self.step < self._steps and not self._stale():
                if self.step and self.step % config.refresh_interval == 0:
                    self.data.refresh(self._policy_of(self.learner.layers()))
                self._update()
                display.advance(self.step)
                if self.step % config.eval_interval == 0:
                    point = self._point(curve)
                    self._consider(point.score)
                    self._losses.clear()
                    display.point(point)
                if self.step % config.checkpoint_interval == 0 or self.step == self._steps:
                    self._save()
            if self.step % config.eval_interval:
                display.point(point := self._point(curve))
                self._consider(point.score)
            if self.step > begin and self.folder.writes:
                self._watch.write()

    def policy(self) -> LearnedPolicy:
        """The policy to freeze, bound to the model of the buffer."""
        layers = self.learner.layers()
        if self.config.keep == "best" and self._best is not None:
            arrays = [tensor.numpy() for tensor in self._best["layers"]]
            layers = list(zip(arrays[::2], arrays[1::2], strict=True))
        return self._policy_of(layers)

    def description(self) -> dict[str, Any]:
        """Every resolved setting, as JSON values."""
        data, settings, learner = self.data, self.data.settings, self.learner
        optimiser = learner.algo.impl.q_function_optim
        return {
            **as_json(self.config),
            "resolved": {
                **data.description(),
                "network": [len(settings.features.names), *self.config.hidden, data.n_actions],
                "activation": "relu",
                "algorithm": type(learner.algo).__name__,
                "optimiser": type(optimiser).__name__,
                "betas": list(optimiser.defaults["betas"]),
                "weight_decay": optimiser.defaults["weight_decay"],
                "candidates": list(settings.candidates),
                "features": asdict(settings.features),
                "reward": asdict(settings.reward),
                "mean": learner.mean.tolist(),
                "std": learner.std.tolist(),
                "n_transitions": len(data.transitions),
                "digest": data.digest,
                "held_out": list(data.held_out),
                "validation_kind": data.validation_kind,
                "model": settings.model,
                "temperature": settings.temperature,
            },
            "versions": versions(),
        }

    def _update(self) -> None:
        loss = self.learner.update(self._batch())
        self.step += 1
        self._losses.append(loss)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} at step {self.step}: the values exploded. Lower learning_rate (now "
                f"{self.config.learning_rate:g}) or, in prompt episodes, gamma (now {self.config.gamma:g})"
            )

    def _batch(self) -> NStepBatch:
        """The next batch, or this process's share of it: which rows are drawn is the same for any number of them."""
        config, n_before, pieces = self.config, 0, []
        greedy = self.learner.target_greedy if config.cut_at_greedy else None
        drawn = self.data.transitions.draw(self._rng, self.step * config.batch_size, config.batch_size)
        for transitions, rows in drawn:
            mine = rows[self._processes.share(n_before)]
            n_before += rows.size
            if mine.size:
                pieces.append(transitions.batch(mine, config.n_steps, config.gamma, greedy))
        return NStepBatch.join(pieces)

    def _point(self, curve: LearningCurve) -> CurvePoint:
        policy = self._policy_of(self.learner.layers())
        values = policy.q_values(self._probe).mean(axis=0, dtype=np.float64)
        point = CurvePoint(
            step=self.step,
            loss=math.fsum(self._losses) / len(self._losses) if self._losses else None,
            q_continue=float(values[CONTINUE]),
            q_exit=float(values[EXIT if self.data.scans else BLIND]),
            score=self.data.score(policy),
        )
        curve.add(point)
        return point

    def _consider(self, score: GreedyScore) -> None:
        if self._best is None or score.merit > self._best["merit"]:
            layers = [torch.from_numpy(array) for pair in self.learner.layers() for array in pair]
            self._best = {"merit": score.merit, "step": self.step, "layers": layers}

    def _stale(self) -> bool:
        """Whether the last `patience` points brought no new best."""
        patience = self.config.patience
        if not patience or self._best is None:
            return False
        return self.step - int(self._best["step"]) >= patience * self.config.eval_interval

    def _policy_of(self, layers: Layers, folded: bool = False) -> LearnedPolicy:
        """A policy of a network's layers; `folded` if they take raw features already."""
        settings = self.data.settings
        return LearnedPolicy.from_network(
            layers,
            mean=None if folded else self.learner.mean,
            std=None if folded else self.learner.std,
            max_draft=self.config.max_draft,
            fingerprint=settings.fingerprint or None,  # a store made by hand may have none
            features=settings.features,
            **self.data.plans,
            trained_temperature=settings.temperature,
        )

    def _save(self) -> None:
        self.folder.save_checkpoint(
            self.step,
            {
                "step": self.step,
                "learner": self.learner.state(),
                "rng": json.dumps(self._rng.bit_generator.state),
                "losses": list(self._losses),
                "best": self._best,
                "data": self.data.state(),
                "settings": json.dumps(fixed_settings(self.config)),
                "digest": self.data.digest,
            },
        )
        if self.folder.writes:
            self._watch.write()


class _Display:
    """A bar on a terminal, elsewhere a line for each point of the curve; nothing if not wanted."""

    def __init__(self, steps: int, done: int, wanted: bool, out: str) -> None:
        self._out = out
        self._console = Console(quiet=not wanted, highlight=False)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[score]}"))
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=self._console, disable=not (wanted and self._console.is_terminal)
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, score="")

    def advance(self, step: int) -> None:
        """Move the bar."""
        if step % 20 == 0:
            self._bar.update(self._task, completed=step)

    def point(self, point: CurvePoint) -> None:
        """Show a point of the curve."""
        score = point.score
        text = f"reward {score.reward:.3f}" if score.speedup is None else f"{score.speedup:.2f}x plain, simulated"
        if score.acceptance is not None and score.exit_layer is not None:
            text += f", acceptance {score.acceptance:.2f}, exit layer {score.exit_layer:.1f}"
        if self._bar.disable:
            loss = "" if point.loss is None else f"loss {point.loss:.4f}, "
            self._console.print(f"step {point.step}: {loss}{text}", soft_wrap=True)
        else:
            self._bar.update(self._task, completed=point.step, score=text)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is KeyboardInterrupt:
            self._console.print(f"stopped; --out {self._out} --resume goes on from the last checkpoint", soft_wrap=True)
