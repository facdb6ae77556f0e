"""Off-policy evaluation: what d3rlpy's fitted Q evaluation says of a policy, beside what playback on traces knows.

A log of decisions that another behaviour made is all that most users of offline learning have. Traces know more: the
policy can be played on them, so how far the estimate is from the truth can be told. Both are rewards of the paper's
process, token by token; seconds are the simulator's matter.

Source: fitted Q evaluation, H. Le, C. Voloshin and Y. Yue, Batch Policy Learning under Constraints (arXiv 1903.08738).
Departs from d3rlpy: squared error unless told otherwise, see `lede.learner.Learner`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from lede.fingerprints import compare_fingerprints
from lede.seeding import Purpose, numpy_stream, torch_stream
from lede.transitions import Greedy, Transitions

if TYPE_CHECKING:
    import torch

    from lede.buffers.settings import StoreSettings
    from lede.buffers.store import TraceStore, TransitionStore
    from lede.policies.learned import LearnedPolicy

_N_ACTIONS = 2  # whichever of them the log holds
_STREAM = 2  # of Purpose.TRAINING
_N_READINGS = 50


@dataclass(frozen=True)
class FqeConfig:
    """Settings of a fitted Q evaluation."""

    steps: int = 3000
    """Updates in all."""
    batch_size: int = 256
    """Transitions in an update."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    hidden: tuple[int, ...] = (64, 64)
    """Units of the hidden layers, ReLU between them."""
    target_update_interval: int = 50
    """Updates between two copies of the network into the target network."""
    loss: Literal["squared", "huber"] = "squared"
    """Error of a value: squared, or d3rlpy's Huber loss, whose minimiser is not the mean."""
    passes: int = 4
    """Times that uniform decisions are played on each trace where no log is given."""
    seed: int = 0
    """Seed of weights, batches and of decisions that are synthesised on traces."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "target_update_interval", "passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class OffPolicyEstimate:
    """Rewards of a token, estimated and true."""

    estimate: float
    """What fitted Q evaluation says of the policy."""
    truth: float
    """What the policy earns when it is played on the traces; with sampling its expectation."""
    logged: float
    """What the behaviour in the log earned."""
    n_transitions: int
    """Decisions in the log."""

    @property
    def distance(self) -> float:
        """Estimate less truth."""
        return self.estimate - self.truth


def evaluate_off_policy(
    policy: LearnedPolicy,
    traces: TraceStore,
    log: TransitionStore | None = None,
    config: FqeConfig | None = None,
) -> OffPolicyEstimate:
    """Hold fitted Q evaluation of a policy against the truth.

    Args:
        policy: Whose features the token-level process defines, and which always scans.
        traces: What the truth comes from.
        log: Recorded decisions with the policy's features and candidates, best of the same prompts; None plays uniform
            decisions on the traces.
        config: Settings.

    Raises:
        ImportError: d3rlpy is not installed.
        ValueError: The policy decides more than exits, looks at features of rounds, or differs from the log.
    """
    from lede.buffers.playback import playback_settings, synthesize
    from lede.learning_curve import score_on_traces

    config = config or FqeConfig()
    check_policy(policy)
    candidates = policy.candidates_for(traces.settings.n_layers)
    if log is None:
        seeds = np.random.SeedSequence(config.seed, spawn_key=(int(Purpose.SYNTHESIS),)).generate_state(config.passes)
        logs = [synthesize(traces, "uniform", int(seed), candidates, policy.features) for seed in seeds]
    else:
        _check_log(log.settings, traces.settings, policy, candidates)
        logs = [log]
    settings = playback_settings(traces.settings, None, candidates, policy.features, logs[0].settings.reward)
    rollouts = [rollout for each in logs for rollout in each if rollout.n_rows]
    transitions = Transitions.from_rollouts(rollouts, "token")
    return OffPolicyEstimate(
        estimate=fitted_value(transitions, policy.greedy, config),
        truth=score_on_traces(traces.prompts, settings, policy.greedy).reward,
        logged=float(transitions.rewards.sum(dtype=np.float64) / transitions.token_end.sum()),
        n_transitions=len(transitions),
    )


def check_policy(policy: LearnedPolicy) -> None:
    """Raise ValueError unless a policy decides what the paper's process lets it decide, by what that process shows."""
    if policy.decides_pre_scan:
        raise ValueError("it is of the paper's process, where a policy always scans; this one decides whether to scan")
    policy.features.check_token_level("fitted Q evaluation")


def fitted_value(transitions: Transitions, greedy: Greedy, config: FqeConfig | None = None) -> float:
    """Mean value of the first decisions of all tokens under a policy, by d3rlpy's `DiscreteFQE`.

    The mean of the last quarter of the fit's readings: a single one moves with the last batches.

    Args:
        transitions: Logged decisions, in token episodes, with no discount.
        greedy: The policy's actions `(row,)` for observations `(row, feature)`.
        config: Settings.

    Raises:
        ImportError: d3rlpy is not installed.
        ValueError: There are no decisions, or episodes are no tokens.
    """
    from lede.quiet_d3rlpy import import_d3rlpy

    import_d3rlpy()
    from d3rlpy.dataset import TransitionMiniBatch

    config = config or FqeConfig()
    if not len(transitions) or transitions.episode != "token":
        raise ValueError(
            f"fitted Q evaluation needs decisions in token episodes, got {len(transitions)} in "
            f"{transitions.episode} episodes"
        )
    fqe = _fqe(transitions, greedy, config)
    first = np.concatenate(([True], transitions.token_end[:-1]))
    states = transitions.states[first]
    actions = np.asarray(greedy(states))
    rng = numpy_stream(config.seed, Purpose.TRAINING, _STREAM)
    every = max(1, config.steps // _N_READINGS)
    readings = []
    for step in range(1, config.steps + 1):
        batch = transitions.batch(rng.integers(0, len(transitions), config.batch_size), 1, 1.0)
        fqe.update(
            TransitionMiniBatch(
                observations=batch.observations,
                actions=batch.actions,
                rewards=batch.rewards,
                next_observations=batch.next_observations,
                next_actions=np.zeros_like(batch.actions),  # the policy is asked instead
                terminals=batch.terminals,
                intervals=batch.intervals,
                transitions=[],
            )
        )
        if step % every == 0 or step == config.steps:
            readings.append(float(fqe.predict_value(states, actions).mean(dtype=np.float64)))
    return float(np.mean(readings[-max(1, len(readings) // 4) :]))


def _fqe(transitions: Transitions, greedy: Greedy, config: FqeConfig) -> Any:
    """An untrained `DiscreteFQE` of the policy."""
    import torch
    from d3rlpy.models.encoders import VectorEncoderFactory
    from d3rlpy.models.q_functions import MeanQFunctionFactory
    from d3rlpy.ope import DiscreteFQE, FQEConfig
    from d3rlpy.preprocessing import StandardObservationScaler

    from lede.learner import SquaredErrorFactory

    mean = transitions.states.mean(axis=0, dtype=np.float64)
    std = transitions.states.std(axis=0, dtype=np.float64)
    std = np.where(std > 1e-6, std, 1.0)
    settings = FQEConfig(
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        gamma=1.0,
        target_update_interval=config.target_update_interval,
        encoder_factory=VectorEncoderFactory(hidden_units=list(config.hidden), activation="relu"),
        q_func_factory=SquaredErrorFactory() if config.loss == "squared" else MeanQFunctionFactory(),
        observation_scaler=StandardObservationScaler(mean=mean, std=std, eps=0.0),
    )
    fqe = DiscreteFQE(algo=_FrozenAlgorithm(greedy, mean, std), config=settings)
    with torch.random.fork_rng():  # the caller's generator is not ours to seed
        torch.manual_seed(torch_stream(config.seed, Purpose.TRAINING, _STREAM).initial_seed())
        fqe.create_impl(mean.shape, _N_ACTIONS)
    return fqe


class _FrozenAlgorithm:
    """A policy of ours where d3rlpy expects an algorithm of its own.

    d3rlpy asks the algorithm's `impl` for actions, with observations that were scaled on the way: they are put back.
    """

    def __init__(self, greedy: Greedy, mean: npt.NDArray[np.float64], std: npt.NDArray[np.float64]) -> None:
        self._greedy, self._mean, self._std = greedy, mean, std
        self.impl = self

    def predict_best_action(self, scaled: torch.Tensor) -> torch.Tensor:
        """The policy's actions `(row,)` at scaled observations `(row, feature)`."""
        import torch

        observations = scaled.cpu().numpy().astype(np.float64) * self._std + self._mean
        return torch.as_tensor(np.asarray(self._greedy(observations.astype(np.float32))), device=scaled.device)


def _check_log(log: StoreSettings, traces: StoreSettings, policy: LearnedPolicy, candidates: tuple[int, ...]) -> None:
    """Raise ValueError unless a log is of the process that the policy decides and the traces tell."""
    wanted = {"features": policy.features, "candidates": candidates}
    odd = [f"{name}: {getattr(log, name)} / {value}" for name, value in wanted.items() if getattr(log, name) != value]
    if odd:
        raise ValueError(f"the log was recorded for another policy (log / policy): {'; '.join(odd)}")
    names = ("n_layers", "vocab_size", "temperature", "top_k", "top_p")
    pairs = [(name, getattr(log, name), getattr(traces, name)) for name in names]
    odd = [f"{name}: {mine} / {theirs}" for name, mine, theirs in pairs if mine != theirs]
    if log.fingerprint and traces.fingerprint:  # stores made by hand may have none
        odd += [f"fingerprint: {phrase}" for phrase in compare_fingerprints(log.fingerprint, traces.fingerprint)]
    if odd:
        raise ValueError(f"the log was recorded otherwise than the traces (log / traces): {'; '.join(odd)}")
