"""The learner: a d3rlpy algorithm fed with our own batches, its full state, and its Q-network as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lede.quiet_d3rlpy import import_d3rlpy
from lede.rewards import CONTINUE, EXIT
from lede.transitions import NStepBatch

import_d3rlpy()  # before its names are imported: without this it prints, and changes torch's settings

from d3rlpy.algos import DiscreteCQLConfig, DoubleDQNConfig, DQNConfig  # noqa: E402
from d3rlpy.dataset import TransitionMiniBatch  # noqa: E402
from d3rlpy.models.encoders import VectorEncoderFactory  # noqa: E402
from d3rlpy.models.q_functions import MeanQFunctionFactory  # noqa: E402
from d3rlpy.models.torch import DiscreteMeanQFunctionForwarder  # noqa: E402
from d3rlpy.preprocessing import StandardObservationScaler  # noqa: E402

if TYPE_CHECKING:
    from lede.training import TrainConfig

Array = npt.NDArray[np.float32]

N_ACTIONS = 2
"""Continue and exit, whichever of them the data holds."""


class Learner:
    """A d3rlpy algorithm on one CPU or GPU.

    Source: d3rlpy's DQN, DoubleDQN and DiscreteCQL.
    Departs from d3rlpy: values are fitted by squared error, as in the formula of its own documentation, where it uses
    the Huber loss. An exit earns about +1 or -2, further from its mean than the Huber threshold of 1, so that the Huber
    minimiser is far from the mean: at an acceptance of 0.6 it is +0.33 where the mean is -0.2, and the policy exits
    wherever a match is more likely than not.

    Args:
        config: Algorithm, network, optimiser and device.
        mean: Mean of the features, `(feature,)`.
        std: Their standard deviations; a feature that never changes has 1.
        seed: Seed of the initial weights.
    """

    def __init__(self, config: TrainConfig, mean: npt.ArrayLike, std: npt.ArrayLike, seed: int) -> None:
        self.config = config
        self.mean, self.std = np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
        settings: dict[str, Any] = {
            "batch_size": config.batch_size,
            "learning_rate": config.learning_rate,
            "gamma": config.gamma,
            "target_update_interval": config.target_update_interval,
            "encoder_factory": VectorEncoderFactory(hidden_units=list(config.hidden), activation="relu"),
            "q_func_factory": _SquaredErrorFactory() if config.loss == "squared" else MeanQFunctionFactory(),
            "observation_scaler": StandardObservationScaler(mean=self.mean, std=self.std, eps=0.0),
        }
        if config.algo == "cql":
            settings["alpha"] = config.cql_alpha
        config_class = {"dqn": DQNConfig, "double-dqn": DoubleDQNConfig, "cql": DiscreteCQLConfig}[config.algo]
        self.algo = config_class(**settings).create(device="cuda:0" if config.device == "cuda" else config.device)
        with torch.random.fork_rng():  # the caller's generator is not ours to seed
            torch.manual_seed(seed)
            self.algo.create_impl(self.mean.shape, N_ACTIONS)
        self._weights = list(self.algo.impl.q_function.parameters())
        self._averages = [weight.detach().clone() for weight in self._weights]

    def update(self, batch: NStepBatch) -> float:
        """One step of gradient descent; every `target_update_interval` steps the target follows. Returns the loss."""
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
        share = max(1 - self.config.averaging, 10 / (self.algo.grad_step + 10)) if self.config.averaging else 1.0
        with torch.no_grad():
            for average, weight in zip(self._averages, self._weights, strict=True):
                average.lerp_(weight, share)
        return float(losses["loss"])

    def target_greedy(self, observations: Array) -> npt.NDArray[np.int64]:
        """Actions `(row,)` of the target network for observations `(row, feature)`."""
        with torch.no_grad():
            x = torch.as_tensor(observations, device=self.algo.impl.device)
            values = self.algo.impl.modules.targ_q_funcs[0](self.algo.observation_scaler.transform(x)).q_value
        chosen = torch.where(values[:, EXIT] > values[:, CONTINUE], EXIT, CONTINUE)
        return np.asarray(chosen.cpu().numpy(), dtype=np.int64)

    def layers(self) -> list[tuple[Array, Array]]:
        """Weight `(out, in)` and bias `(out,)` of each layer of the averaged Q-network, on normalised features."""
        arrays = [average.cpu().numpy().copy() for average in self._averages]
        return list(zip(arrays[::2], arrays[1::2], strict=True))

    def state(self) -> dict[str, Any]:
        """Networks, optimiser and step count: all that the next update depends on, but for the data."""
        modules = self.algo.impl.modules
        return {
            "q_funcs": modules.q_funcs.state_dict(),
            "targ_q_funcs": modules.targ_q_funcs.state_dict(),
            "optim": modules.optim.state_dict(),
            "grad_step": self.algo.grad_step,
            "averages": self._averages,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        modules = self.algo.impl.modules
        modules.q_funcs.load_state_dict(state["q_funcs"])
        modules.targ_q_funcs.load_state_dict(state["targ_q_funcs"])
        modules.optim.load_state_dict(state["optim"])
        self.algo.set_grad_step(state["grad_step"])
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.copy_(saved)


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


class _SquaredErrorFactory(MeanQFunctionFactory):  # type: ignore[misc]  # d3rlpy carries no types
    """d3rlpy's mean Q-function with the squared error."""

    def create_discrete(self, encoder: Any, hidden_size: int, action_size: int) -> tuple[Any, Any]:
        """The network and what computes its error."""
        q_func, _ = super().create_discrete(encoder, hidden_size, action_size)
        return q_func, _SquaredErrorForwarder(q_func, action_size)

    @staticmethod
    def get_type() -> str:
        """Name in d3rlpy's own configuration."""
        return "mean_squared_error"
