"""What a run learns from: stores opened, checked, split, and transitions played on traces."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from lede.buffers.records import PromptTrace
from lede.buffers.store import TraceStore
from lede.features import parse_candidates
from lede.fingerprints import compare_fingerprints
from lede.learning_curve import GreedyScore, score_on_rollouts, score_on_traces
from lede.policies.base import BLIND
from lede.policies.learned import LearnedPolicy
from lede.scoring import Scorer
from lede.seeding import Purpose, numpy_stream
from lede.store_parts import sample_shards
from lede.trace_table import TraceTable
from lede.transitions import Transitions
from lede.wall_clock_data import WallClockData, best_static, policy_settings
from lede.windows import TransitionWindows

if TYPE_CHECKING:
    from lede.buffers.records import PromptRollout
    from lede.buffers.settings import StoreSettings
    from lede.buffers.store import TransitionStore
    from lede.cost_profile import CostProfile
    from lede.training_config import TrainConfig

Layers = tuple[int, ...]
Freeze = Callable[..., LearnedPolicy]
"""Makes a policy of a network's layers."""

_HOLDOUT_STREAM = 1
_ROLLOUT_NUMBERS = ("observations", "rewards", "final_observation")
_ROW_NUMBERS = ("confidence", "entropy", "top1", "top2", "match")
_TRACE_NUMBERS = (
    *_ROW_NUMBERS, "anchor", *(f"closing_{name}" for name in _ROW_NUMBERS[:-1]),
    *(f"branch_{name}" for name in _ROW_NUMBERS[:-1]),
)  # fmt: skip


@dataclass(frozen=True)
class TrainingData:
    """Transitions to learn from and text to be scored on."""

    transitions: Transitions | TransitionWindows
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
    scorer: Scorer | None = None
    """Simulated seconds of a policy on the validation traces; None without a cost profile."""

    n_actions = BLIND
    stage_flags: ClassVar[tuple[int, ...]] = ()
    scans = True

    @property
    def plans(self) -> dict[str, Any]:
        """Settings of the policy to be: what it chooses from."""
        return {"candidates": self.settings.candidates}

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of each feature, `(feature,)`."""
        return self.transitions.mean

    def refresh(self, policy: LearnedPolicy) -> None:
        """Nothing to renew: the behaviour is the recorded one."""

    def state(self) -> dict[str, Any]:
        """Nothing that a checkpoint needs."""
        return {}

    def load_state(self, state: dict[str, Any], freeze: Freeze) -> None:
        """Nothing to go on from."""

    def description(self) -> dict[str, Any]:
        """What was settled, as JSON values."""
        windows = {"windows": self.transitions.n_windows} if isinstance(self.transitions, TransitionWindows) else {}
        return {"objective": "paper", "validation_prompts": len(self.validation), **windows}

    def score(self, policy: LearnedPolicy) -> GreedyScore:
        """The policy on the validation text; in seconds too if there is a cost profile."""
        if self.validation_kind == "traces":
            score = score_on_traces(self.validation, self.settings, policy.greedy)  # type: ignore[arg-type]  # by its kind
        else:
            score = score_on_rollouts(self.validation, policy.greedy)  # type: ignore[arg-type]  # by its kind
        if self.scorer is None:
            return score
        seconds = self.scorer(policy)
        return replace(
            score,
            speedup=seconds.speedup,
            draft_length=seconds.draft_length,
            exits=seconds.exits,
            regret=seconds.regret,
        )

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each feature, `(feature,)`; 1 for one that never changes."""
        return self.transitions.std


def load_data(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore,
    validation: TransitionStore | TraceStore | None,
    profile: CostProfile | None = None,
) -> TrainingData | WallClockData:
    """Check the stores and prepare the run's data.

    Args:
        config: Settled settings.
        buffer: Transitions or traces.
        validation: Traces of other prompts.
        profile: What operations cost.

    Raises:
        ValueError: A number is not finite, a candidate was left too rarely, the validation store or the profile is of
            another kind, model or setting, or there is nothing to learn from.
    """
    if is_windowed(config, buffer):
        if config.objective != "wall-clock" or not isinstance(buffer, TraceStore):
            from lede.windowed_data import load_windows

            return load_windows(config, buffer, validation, profile)
        buffer = sample_shards(buffer, config.window, config.splits_by)
    _check_finite(buffer)
    if validation is not None:
        check_validation(buffer, validation)
        warn_of_shared({record.prompt_ids.tobytes() for record in buffer.prompts}, validation)
        _check_finite(validation)
    held_out = _hold_out(config, buffer) if validation is None else ()
    scored = validation if validation is not None else buffer.select(held_out or buffer.prompt_indices)
    if profile is not None:
        check_profile(buffer, profile)
    if profile is not None and config.objective == "wall-clock":
        return _wall_clock(config, buffer, scored, profile, held_out)
    stores = _transition_stores(config, buffer, profile, held_out)
    exits = np.concatenate([rollout.exit_layer for rollout in stores[0]] or [np.zeros(0, dtype=np.int16)])
    check_exits({layer: int((exits == layer).sum()) for layer in stores[0].settings.candidates}, config.min_exits)
    rollouts = [rollout for store in stores for rollout in store if rollout.prompt_index not in held_out]
    transitions = Transitions.from_rollouts(rollouts, "prompt" if config.episode == "prompt" else "token")
    check_ends(config, bool(transitions.terminated.any()))
    return TrainingData(
        transitions=transitions,
        settings=stores[0].settings,
        validation=scored.prompts,
        validation_kind=scored.kind,
        held_out=held_out,
        digest=digest_of([transitions, *scored.prompts, *([] if profile is None else [profile.costs])]),
        scorer=make_scorer(config, stores[0].settings, scored, profile),
    )


def _wall_clock(
    config: TrainConfig,
    buffer: TransitionStore | TraceStore,
    scored: TransitionStore | TraceStore,
    profile: CostProfile,
    held_out: tuple[int, ...],
) -> WallClockData:
    kept = [trace for trace in buffer if isinstance(trace, PromptTrace) and trace.prompt_index not in held_out]
    others = [trace for trace in scored if isinstance(trace, PromptTrace)]
    searched = buffer.select(_others(buffer, held_out)) if held_out else buffer
    candidates = _candidates(config, searched, profile) if "exit" in config.sources else buffer.settings.candidates
    settings = policy_settings(config, buffer.settings, candidates)
    digest = digest_of([*kept, *others, profile.costs])
    budget = scored.settings.max_new_tokens
    return WallClockData(config, settings, kept, others, profile.costs, held_out, digest, budget)


def _candidates(config: TrainConfig, buffer: TransitionStore | TraceStore, profile: CostProfile | None) -> Layers:
    """The candidates that were given, the store's, or those that a search finds fastest.

    With fixed drafts to choose from, the layer of the best of them is among the latter.
    """
    settings = buffer.settings
    if config.candidates != "auto":
        return parse_candidates(config.candidates or settings.candidates, settings.n_layers)
    from lede.candidate_search import search_candidates

    if profile is None:
        raise ValueError("--candidates auto weighs what inspections cost and needs a cost profile (--profile)")
    traces = [trace for trace in buffer if isinstance(trace, PromptTrace)]
    table = TraceTable.from_traces(traces, settings.max_new_tokens, settings.vocab_size, config.branches)
    # branches were recorded at the store's candidates alone
    layers = None if table.branches is None else settings.candidates
    found = search_candidates(table, profile.costs, layers, config.max_draft, seed=config.seed).candidates
    if not config.fixed_lengths:
        return found
    fixed = best_static(table, profile.costs, config.max_draft, layers, config.fixed_lengths, config.seed)
    assert fixed.config.exit_layer is not None  # none of those that are tried leaves it to the model
    return tuple(sorted({*found, fixed.config.exit_layer}))


def is_windowed(config: TrainConfig, buffer: TransitionStore | TraceStore) -> bool:
    """Whether the buffer is too large to be held: on disk, and with more rows than a window."""
    return buffer.n_shards > 0 and buffer.n_rows > config.window


def _transition_stores(
    config: TrainConfig, buffer: TransitionStore | TraceStore, profile: CostProfile | None, held_out: tuple[int, ...]
) -> list[TransitionStore]:
    """The buffer itself, or passes of uniform decisions over its traces."""
    if not isinstance(buffer, TraceStore):
        return [buffer]
    searched = buffer.select(_others(buffer, held_out)) if held_out else buffer
    return [play(buffer) for play in uniform_passes(config, searched, profile)]


def _others(buffer: TransitionStore | TraceStore, held_out: tuple[int, ...]) -> list[int]:
    """The prompts that may be learned from; choosing candidates by them is learning too."""
    return sorted(set(buffer.prompt_indices) - set(held_out))


def uniform_passes(
    config: TrainConfig, searched: TraceStore, profile: CostProfile | None
) -> list[Callable[[TraceStore], TransitionStore]]:
    """What plays uniform decisions on traces, once for each pass; on a part of the buffer as on the whole.

    Args:
        config: Settled settings.
        searched: Traces that candidates are searched on, where they are.
        profile: What operations cost.
    """
    from lede.buffers.playback import synthesize

    seeds = np.random.SeedSequence(config.seed, spawn_key=(int(Purpose.SYNTHESIS),)).generate_state(config.passes)
    layers = None if config.candidates is None else _candidates(config, searched, profile)
    features = None if config.features is None else replace(searched.settings.features, names=config.features)
    return [
        partial(synthesize, behaviour="uniform", seed=int(seed), candidates=layers, features=features) for seed in seeds
    ]


def _hold_out(config: TrainConfig, buffer: TransitionStore | TraceStore) -> tuple[int, ...]:
    """A share of the texts; a prompt that comes again goes where its first copy goes."""
    copies: dict[bytes, list[int]] = {}
    for record in buffer.prompts:
        if record.n_rows:
            copies.setdefault(record.prompt_ids.tobytes(), []).append(record.prompt_index)
    groups = list(copies.values())
    n_held = min(round(config.holdout * len(groups)) or 1, len(groups) - 1) if config.holdout > 0 else 0
    order = numpy_stream(config.splits_by, Purpose.TRAINING, _HOLDOUT_STREAM).permutation(len(groups))
    return tuple(sorted(index for i in order[: max(n_held, 0)] for index in groups[i]))


def _check_finite(store: TransitionStore | TraceStore) -> None:
    """Refuse NaN and infinity by the row, counted over the prompts in order."""
    first_row = 0
    for record in store.prompts:  # read once, kept for what follows
        check_finite_record(record, first_row, store.path or "the store")
        first_row += record.n_rows


def check_finite_record(record: PromptTrace | PromptRollout, first_row: int, where: str) -> None:
    """Refuse NaN and infinity by the row, counted from `first_row` at the record's own first.

    Raises:
        ValueError: A number is not finite.
    """
    for name in _TRACE_NUMBERS if isinstance(record, PromptTrace) else _ROLLOUT_NUMBERS:
        values = np.atleast_1d(getattr(record, name))
        if not np.isfinite(values).all():
            place = np.argwhere(~np.isfinite(values))[0].tolist()
            of_rows = name in (*_ROW_NUMBERS, "observations", "rewards")
            row = f"row {first_row + place[0]}" if of_rows else "the record"
            raise ValueError(
                f"{row} (prompt {record.prompt_index}) of {where} holds {values[tuple(place)]} in `{name}`: the "
                "model's logits were not finite there. Collect the prompt again, with a wider dtype if it recurs"
            )


def check_exits(counts: dict[int, int], min_exits: int) -> None:
    """Refuse data with too few exits at a candidate; `counts` has them by candidate."""
    rare = [f"layer {layer} ({count} exits)" for layer, count in counts.items() if count < min_exits]
    if rare:
        raise ValueError(
            f"too few exits to learn from at candidate {', '.join(rare)}; {min_exits} are wanted (min_exits). Collect "
            "more prompts, explore with 'uniform', or leave the candidate out"
        )


def check_ends(config: TrainConfig, terminated: bool) -> None:
    """Refuse prompt episodes without discount of which none is `terminated`."""
    if config.episode == "prompt" and config.gamma == 1 and not terminated:
        raise ValueError(
            "episode='prompt' with gamma 1, and no prompt that is trained on ends by EOS: the value of going on "
            "without end is infinite. Give a gamma below 1 (it applies per token), or collect with a larger "
            "max_new_tokens"
        )


def check_validation(buffer: TransitionStore | TraceStore, validation: TransitionStore | TraceStore) -> None:
    """Refuse a validation store of another kind, model or setting, or without a token."""
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


def warn_of_shared(seen: Container[bytes], validation: TransitionStore | TraceStore) -> None:
    """Warn of validation prompts whose ids are among those `seen` in the buffer."""
    shared = sum(record.prompt_ids.tobytes() in seen for record in validation.prompts)
    if shared:
        warnings.warn(
            f"{shared} of {len(validation)} validation prompts are in the buffer too: the curve flatters the policy",
            stacklevel=4,
        )


def make_scorer(
    config: TrainConfig, settings: StoreSettings, scored: TransitionStore | TraceStore, profile: CostProfile | None
) -> Scorer | None:
    """What says how many seconds a policy takes on what is scored; None without traces or a profile."""
    if profile is None or scored.kind != "traces":
        return None
    budget = scored.settings.max_new_tokens
    table = TraceTable.from_traces(scored.prompts, budget, settings.vocab_size, config.branches)
    return Scorer(table, profile.costs, settings.candidates, config.max_draft)


def check_profile(buffer: TransitionStore | TraceStore, profile: CostProfile) -> None:
    """Refuse a cost profile of another model."""
    if not buffer.settings.fingerprint:  # made by hand
        return
    odd = compare_fingerprints(buffer.settings.fingerprint, profile.fingerprint)
    if odd:
        raise ValueError(
            f"the cost profile is of another model than the buffer (buffer / profile): {'; '.join(odd)}. Make one with "
            "`lede profile` on the buffer's model"
        )


def digest_of(records: Iterable[Any]) -> str:
    """SHA-256 over the fields of records."""
    digest = hashlib.sha256()
    for record in records:
        for name, value in vars(record).items():
            content = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            digest.update(name.encode() + content)
    return digest.hexdigest()
