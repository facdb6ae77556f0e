"""What a run learns from: stores opened, checked, split, and transitions played on traces."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lede.fingerprints import compare_fingerprints
from lede.seeding import Purpose, numpy_stream
from lede.transitions import Transitions

if TYPE_CHECKING:
    from lede.buffers.records import PromptRollout, PromptTrace
    from lede.buffers.settings import StoreSettings
    from lede.buffers.store import TraceStore, TransitionStore
    from lede.training import TrainConfig

_HOLDOUT_STREAM = 1


@dataclass(frozen=True)
class TrainingData:
    """Transitions to learn from and text to be scored on."""

    transitions: Transitions
    """What batches are drawn from."""
    settings: StoreSettings
    """Candidates, features, reward and fingerprint, as transitions have them."""
    validation: Sequence[PromptTrace] | Sequence[PromptRollout]
    """What the greedy policy is scored on."""
    validation_kind: str
    """`traces` if the score is exact, `transitions` if only agreeing tokens count."""
    held_out: tuple[int, ...]
    """Prompts of the buffer that are scored on and not learned from."""
    digest: str
    """SHA-256 over the transitions and what is scored on."""

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of each feature, `(feature,)`."""
        return np.asarray(self.transitions.states.mean(axis=0, dtype=np.float64))

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each feature, `(feature,)`; 1 for one that never changes."""
        std = self.transitions.states.std(axis=0, dtype=np.float64)
        return np.where(std > 1e-6, std, 1.0)


def load_data(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore,
    validation: TransitionStore | TraceStore | None,
) -> TrainingData:
    """Check the stores and prepare the run's data.

    Raises:
        ValueError: A number is not finite, a candidate was left too rarely, the validation store is of another kind,
            model or setting, or there is nothing to learn from.
    """
    _check_finite(buffer)
    if validation is not None:
        _check_validation(buffer, validation)
        _check_finite(validation)
    held_out = _hold_out(config, buffer) if validation is None else ()
    scored = validation if validation is not None else buffer.select(held_out or buffer.prompt_indices)
    stores = _transition_stores(config, buffer)
    _check_exits(stores[0], config.min_exits)
    rollouts = [rollout for store in stores for rollout in store if rollout.prompt_index not in held_out]
    transitions = Transitions.from_rollouts(rollouts, config.episode)
    if config.episode == "prompt" and config.gamma == 1 and not transitions.terminated.any():
        raise ValueError(
            "episode='prompt' with gamma 1, and no prompt that is trained on ends by EOS: the value of going on "
            "without end is infinite. Give a gamma below 1 (it applies per token), or collect with a larger "
            "max_new_tokens"
        )
    return TrainingData(
        transitions=transitions,
        settings=stores[0].settings,
        validation=scored.prompts,
        validation_kind=scored.kind,
        held_out=held_out,
        digest=_digest(transitions, scored.prompts),
    )


def _transition_stores(config: TrainConfig, buffer: TransitionStore | TraceStore) -> list[TransitionStore]:
    """The buffer itself, or passes of uniform decisions over its traces."""
    from lede.buffers.playback import synthesize
    from lede.buffers.store import TraceStore

    if not isinstance(buffer, TraceStore):
        return [buffer]
    seeds = np.random.SeedSequence(config.seed, spawn_key=(int(Purpose.SYNTHESIS),)).generate_state(config.passes)
    return [synthesize(buffer, "uniform", seed=int(seed)) for seed in seeds]


def _hold_out(config: TrainConfig, buffer: TransitionStore | TraceStore) -> tuple[int, ...]:
    """A share of the texts; a prompt that comes again goes where its first copy goes."""
    copies: dict[bytes, list[int]] = {}
    for record in buffer.prompts:
        if record.n_rows:
            copies.setdefault(record.prompt_ids.tobytes(), []).append(record.prompt_index)
    groups = list(copies.values())
    n_held = min(round(config.holdout * len(groups)) or 1, len(groups) - 1) if config.holdout > 0 else 0
    order = numpy_stream(config.seed, Purpose.TRAINING, _HOLDOUT_STREAM).permutation(len(groups))
    return tuple(sorted(index for i in order[: max(n_held, 0)] for index in groups[i]))


def _check_finite(store: TransitionStore | TraceStore) -> None:
    """Refuse NaN and infinity by the row, counted over the prompts in order."""
    names = {
        "transitions": ("observations", "rewards", "final_observation"),
        "traces": ("confidence", "entropy", "top1", "match", "anchor", "closing_confidence", "closing_entropy"),
    }[store.kind]
    first_row = 0
    for record in store.prompts:  # read once, kept for what follows
        for name in names:
            values = np.atleast_1d(getattr(record, name))
            if not np.isfinite(values).all():
                place = np.argwhere(~np.isfinite(values))[0].tolist()
                of_rows = name not in ("anchor", "final_observation", "closing_confidence", "closing_entropy")
                where = f"row {first_row + place[0]}" if of_rows else "the record"
                raise ValueError(
                    f"{where} (prompt {record.prompt_index}) of {store.path or 'the store'} holds "
                    f"{values[tuple(place)]} in `{name}`: the model's logits were not finite there. Collect the prompt "
                    "again, with a wider dtype if it recurs"
                )
        first_row += record.n_rows


def _check_exits(store: TransitionStore, min_exits: int) -> None:
    exits = np.concatenate([rollout.exit_layer for rollout in store] or [np.zeros(0, dtype=np.int16)])
    counts = {layer: int((exits == layer).sum()) for layer in store.settings.candidates}
    rare = [f"layer {layer} ({count} exits)" for layer, count in counts.items() if count < min_exits]
    if rare:
        raise ValueError(
            f"too few exits to learn from at candidate {', '.join(rare)}; {min_exits} are wanted (min_exits). Collect "
            "more prompts, explore with 'uniform', or leave the candidate out"
        )


def _check_validation(buffer: TransitionStore | TraceStore, validation: TransitionStore | TraceStore) -> None:
    if validation.kind != "traces":
        raise ValueError(f"validation must be a store of traces (--collector teacher), got one of {validation.kind}")
    ours, theirs = buffer.settings, validation.settings
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(ours, name), getattr(theirs, name))
        for name in ("n_layers", "vocab_size", "temperature", "top_k", "top_p")
    }
    pairs["features.top_k"] = (ours.features.top_k, theirs.features.top_k)
    odd = [f"{name}: {mine} / {other}" for name, (mine, other) in pairs.items() if mine != other]
    if ours.fingerprint and theirs.fingerprint:  # stores made by hand may have none
        odd += [f"fingerprint: {phrase}" for phrase in compare_fingerprints(ours.fingerprint, theirs.fingerprint)]
    if odd:
        raise ValueError(
            f"validation was collected differently from the buffer (buffer / validation): {'; '.join(odd)}"
        )
    if not validation.n_rows:
        raise ValueError("the validation store holds no decided token")
    seen = {record.prompt_ids.tobytes() for record in buffer.prompts}
    shared = sum(record.prompt_ids.tobytes() in seen for record in validation.prompts)
    if shared:
        warnings.warn(
            f"{shared} of {len(validation)} validation prompts are in the buffer too: the curve flatters the policy",
            stacklevel=4,
        )


def _digest(transitions: Transitions, scored: Sequence[PromptTrace] | Sequence[PromptRollout]) -> str:
    digest = hashlib.sha256()
    for record in (transitions, *scored):
        for name, value in vars(record).items():
            content = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            digest.update(name.encode() + content)
    return digest.hexdigest()
