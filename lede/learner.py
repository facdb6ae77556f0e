"""The learner: a d3rlpy algorithm fed with our own batches, its full state, and its Q-network as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lede.policies.base import BLIND
from lede.processes import Processes
from lede.quiet_d3rlpy import import_d3rlpy
from lede.rewards import EXIT
from lede.transitions import NStepBatch

import_d3rlpy()  # before its names are imported: without this it prints, and changes torch's settings

from d3rlpy.algos import DiscreteCQLConfig, DoubleDQNConfig, DQNConfig  # noqa: E402  # only after import_d3rlpy
from d3rlpy.dataset import TransitionMiniBatch  # noqa: E402  # only after import_d3rlpy
from d3rlpy.models.encoders import VectorEncoderFactory  # noqa: E402  # only after import_d3rlpy
from d3rlpy.models.q_functions import MeanQFunctionFactory  # noqa: E402  # only after import_d3rlpy
from d3rlpy.models.torch import DiscreteMeanQFunction, DiscreteMeanQFunctionForwarder  # noqa: E402  # only after import_d3rlpy
from d3rlpy.preprocessing import StandardObservationScaler  # noqa: E402  # only after import_d3rlpy
from d3rlpy.torch_utility import unwrap_ddp_model  # noqa: E402  # only after import_d3rlpy

if TYPE_CHECKING:
    from lede.training_config import TrainConfig

Array = npt.NDArray[np.float32]

_ILLEGAL = -1e4
"""Value of a plan of the pre-scan where there is no pre-scan; in tokens, and far below any sum of rewards."""


class Learner:
    """A d3rlpy algorithm on one CPU or GPU, or on one a process.

    Source: d3rlpy's DQN, DoubleDQN and DiscreteCQL.
    Departs from d3rlpy: values are fitted by squared error, as in the formula of its own documentation, where it uses
    the Huber loss. An exit earns about +1 or -2, further from its mean than the Huber threshold of 1, so that the Huber
    minimiser is far from the mean: at an acceptance of 0.6 it is +0.33 where the mean is -0.2, and the policy exits
    wherever a match is more likely than not.

    Args:
        config: Algorithm (one of d3rlpy's), network, optimiser and device.
        mean: Mean of the features, `(feature,)`.
        std: Their standard deviations; a feature that never changes has 1.
        seed: Seed of the initial weights.
        n_actions: Actions, whichever of them the data holds: continue and exit, and the plans of the pre-scan.
        stage_flags: Places of `in_scan` and `in_draft` in the observation, which tell where plans are legal; needed
            with plans, unless there is no scan.
        scans: Whether there are candidates to scan; without, there is no stage but the pre-scan.
        processes: Those that train together, by DDP if they are several; None for this one alone.
    """

    def __init__(
        self,
        config: TrainConfig,
        mean: npt.ArrayLike,
        std: npt.ArrayLike,
        seed: int,
        n_actions: int = BLIND,
        stage_flags: Sequence[int] = (),
        scans: bool = True,
        processes: Processes | None = None,
    ) -> None:
        self.config = config
        self._processes = processes or Processes(device="cuda:0" if config.device == "cuda" else config.device)
        self.n_actions = n_actions
        self.scans = scans
        self.mean, self.std = np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
        settings: dict[str, Any] = {
            "batch_size": config.batch_size,
            "learning_rate": config.learning_rate,
            "gamma": config.gamma,
            "target_update_interval": config.target_update_interval,
            "encoder_factory": VectorEncoderFactory(hidden_units=list(config.hidden), activation="relu"),
            "q_func_factory": self._q_function(stage_flags),
            "observation_scaler": StandardObservationScaler(mean=self.mean, std=self.std, eps=0.0),
        }
        if config.algo == "cql":
            settings["alpha"] = config.cql_alpha
        config_class = {"dqn": DQNConfig, "double-dqn": DoubleDQNConfig, "cql": DiscreteCQLConfig}[config.algo]
        self.algo = config_class(**settings).create(self._processes.device, self._processes.size > 1)
        with torch.random.fork_rng():  # the caller's generator is not ours to seed
            torch.manual_seed(seed)
            self.algo.create_impl(self.mean.shape, n_actions)
        self._weights = list(self.algo.impl.q_function.parameters())
        self._averages = [weight.detach().clone() for weight in self._weights]

    def update(self, batch: NStepBatch) -> float:
        """One step of gradient descent; every `target_update_interval` steps the target follows. Returns the loss.

        Each of several processes gives its share of the batch; gradient and loss are those of the whole.
        """
        losses = self.algo.update(
            TransitionMiniBatch(
                observations=batch.observations,
                actions=batch.actions,
                rewards=batch.rewards,
                next_observations=batch.next_observations,
                next_actions=np.zeros_like(batch.actions),  # none of these algorithms looks at it
                terminals=batch.terminals,
                intervals=batch.intervals,
                transitions=[],
            )
        )
        # at the start the average spans a tenth of the steps so far, so that it forgets the initial weights
        averaging = self.config.averaging or 0.0
        share = max(1 - averaging, 10 / (self.algo.grad_step + 10)) if averaging else 1.0
        with torch.no_grad():
            for average, weight in zip(self._averages, self._weights, strict=True):
                average.lerp_(weight, share)
        return self._processes.mean(float(losses["loss"]))

    def target_greedy(self, observations: Array) -> npt.NDArray[np.int64]:
        """Actions `(row,)` of the target network for observations `(row, feature)`."""
        with torch.no_grad():
            x = torch.as_tensor(observations, device=self.algo.impl.device)
            values = self.algo.impl.modules.targ_q_funcs[0](self.algo.observation_scaler.transform(x)).q_value
        return np.asarray(values.argmax(dim=1).cpu().numpy(), dtype=np.int64)

    def layers(self) -> list[tuple[Array, Array]]:
        """Weight `(out, in)` and bias `(out,)` of each layer of the averaged Q-network, on normalised features."""
        arrays = [average.cpu().numpy().copy() for average in self._averages]
        return list(zip(arrays[::2], arrays[1::2], strict=True))

    def _q_function(self, stage_flags: Sequence[int]) -> MeanQFunctionFactory:
        if self.scans and self.n_actions > BLIND and len(stage_flags) != 2:
            raise ValueError("plans of the pre-scan need the features 'in_scan' and 'in_draft' in the observation")
        factory = SquaredErrorFactory() if self.config.loss == "squared" else _StagedFactory()
        factory.scans = self.scans
        if self.scans and self.n_actions > BLIND:  # halfway between 0 and 1, normalised as the network sees it
            factory.limits = tuple((flag, float((0.5 - self.mean[flag]) / self.std[flag])) for flag in stage_flags)
        return factory

    def state(self) -> dict[str, Any]:
        """Networks, optimiser and step count: all that the next update depends on, but for the data."""
        modules = self.algo.impl.modules
        return {
            "q_funcs": unwrap_ddp_model(modules.q_funcs).state_dict(),
            "targ_q_funcs": unwrap_ddp_model(modules.targ_q_funcs).state_dict(),
            "optim": modules.optim.state_dict(),
            "grad_step": self.algo.grad_step,
            "averages": self._averages,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        modules = self.algo.impl.modules
        unwrap_ddp_model(modules.q_funcs).load_state_dict(state["q_funcs"])
        unwrap_ddp_model(modules.targ_q_funcs).load_state_dict(state["targ_q_funcs"])
        modules.optim.load_state_dict(state["optim"])
        self.algo.set_grad_step(state["grad_step"])
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.copy_(saved)


class _StagedQFunction(DiscreteMeanQFunction):  # type: ignore[misc]  # d3rlpy carries no types
    """A Q-function whose plans of the pre-scan are worth nothing in the scan and in the draft, or without any scan."""

    def __init__(
        self, encoder: Any, hidden_size: int, action_size: int, limits: Sequence[tuple[int, float]], scans: bool
    ) -> None:
        super().__init__(encoder, hidden_size, action_size)
        self.limits, self.scans = limits, scans

    def forward(self, x: torch.Tensor) -> Any:
        """Values `(batch, action)`, illegal plans at a value that is never the largest."""
        output = super().forward(x)
        if not self.scans:
            scan = torch.arange(output.q_value.shape[1], device=x.device) == EXIT
            return output._replace(q_value=output.q_value.masked_fill(scan, _ILLEGAL))
        if not self.limits:
            return output
        later = torch.stack([x[:, flag] > limit for flag, limit in self.limits]).any(dim=0)
        plans = torch.arange(output.q_value.shape[1], device=x.device) >= BLIND
        return output._replace(q_value=output.q_value.masked_fill(later[:, None] & plans, _ILLEGAL))


class _StagedFactory(MeanQFunctionFactory):  # type: ignore[misc]  # d3rlpy carries no types
    """d3rlpy's mean Q-function, with illegal plans masked."""

    limits: Sequence[tuple[int, float]] = ()
    """Column of each stage flag, and what it exceeds where it is set."""
    scans: bool = True
    """Whether there is a scan."""
    forwarder = DiscreteMeanQFunctionForwarder
    """What computes the error."""

    def create_discrete(self, encoder: Any, hidden_size: int, action_size: int) -> tuple[Any, Any]:
        """The network and what computes its error."""
        q_func = _StagedQFunction(encoder, hidden_size, action_size, self.limits, self.scans)
        return q_func, self.forwarder(q_func, action_size)

    @staticmethod
    def get_type() -> str:
        """Name in d3rlpy's own configuration."""
        return "mean_staged"


class _SquaredErrorForwarder(DiscreteMeanQFunctionForwarder):  # type: ignore[misc]  # d3rlpy carries no types
    """Fits the mean of the return."""

    def compute_error(
        self,
        observations: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        target: torch.Tensor,
        terminals: torch.Tensor,
        gamma: float | torch.Tensor = 0.99,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Half the squared error, as the Huber loss has near zero."""
        values = self._q_func(observations).q_value.gather(1, actions.view(-1, 1))
        wanted = rewards + gamma * target * (1 - terminals)
        error: torch.Tensor = 0.5 * (values - wanted) ** 2
        return error.mean() if reduction == "mean" else error


class SquaredErrorFactory(_StagedFactory):
    """The same with the squared error."""

    forwarder = _SquaredErrorForwarder

    @staticmethod
    def get_type() -> str:
        """Name in d3rlpy's own configuration."""
        return "mean_squared_error"
