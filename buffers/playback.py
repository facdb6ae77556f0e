"""Playback: decisions acted out on recorded traces, without the model.

A trace holds what every layer says about every token; the text is the target's whatever is decided, so any behaviour
can be played on it and gives the transitions that the live environment would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lede.buffers.records import PromptRollout, PromptTrace
from lede.buffers.settings import StoreSettings
from lede.buffers.store import TraceStore, TransitionStore
from lede.features import ConfidenceTrace, FeatureConfig, parse_candidates
from lede.rewards import EXIT, RewardConfig
from lede.seeding import Purpose, numpy_stream

Greedy = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.integer]]
"""Chooses actions `(row,)` for observations `(row, feature)`."""


def replay(
    trace: PromptTrace,
    exit_layers: npt.ArrayLike,
    settings: StoreSettings,
    rng: np.random.Generator | None = None,
) -> PromptRollout:
    """The transitions of one prompt under given decisions.

    Args:
        trace: Full information about the prompt.
        exit_layers: Where each decided token exits, `(token - 1,)`: a candidate layer, or 0 for nowhere.
        settings: Candidates, features, reward, sizes of the model, seed.
        rng: Draws the matches of a sampled text (probability beta); one number a decided token. None draws what the
            live environment draws for this prompt: from the `Purpose.MATCHES` stream of the settings' seed, the
            prompt and the token.

    Raises:
        ValueError: An exit layer is no candidate, or the trace has another number of tokens or layers.
    """
    exits = np.asarray(exit_layers, dtype=np.int64)
    candidates = np.asarray(settings.candidates, dtype=np.int64)
    settings.features.check_token_level("playback")
    _check(trace, exits, settings)
    exited = exits > 0
    # index of the last candidate that is inspected: the exit, or the last one when there is no exit
    last = np.where(exited, np.searchsorted(candidates, exits), candidates.size - 1)
    traces = trace_feature(trace, exits, settings.features.window)
    values: dict[str, npt.ArrayLike] = {**text_values(trace, candidates), "trace": traces[:-1, None]}
    # (token - 1, candidate, feature)
    everywhere = settings.features.observe(values, settings.n_layers, settings.vocab_size)
    token, candidate = np.nonzero(np.arange(candidates.size) <= last[:, None])
    token_end = candidate == last[token]
    actions = token_end & exited[token]
    matched = _draw_matches(trace, exits, settings, rng)[token]
    layer = candidates[candidate]
    rewards = np.where(
        actions,
        settings.reward.exit(layer, settings.n_layers, matched),
        settings.reward.going_on(token_end),
    )
    observations = everywhere[token, candidate]
    return PromptRollout(
        prompt_index=trace.prompt_index,
        prompt_ids=trace.prompt_ids,
        token_ids=trace.token_ids,
        ended_by_eos=trace.ended_by_eos,
        observations=observations,
        actions=actions,
        rewards=rewards,
        layer=layer.astype(np.int16),
        exit_layer=np.where(actions, layer, 0).astype(np.int16),
        token_index=(token + 1).astype(np.int32),
        token_end=token_end,
        match=np.where(actions, matched, -1),
        final_observation=_final_observation(trace, observations, traces[-1], settings),
    )


def synthesize(
    store: TraceStore,
    behaviour: str = "uniform",
    seed: int | None = None,
    candidates: Sequence[int] | None = None,
    features: FeatureConfig | None = None,
    reward: RewardConfig | None = None,
) -> TransitionStore:
    """Transitions in memory from traces: what a rollout with this behaviour would have recorded.

    Args:
        store: Traces.
        behaviour: `uniform` draws, for every token, one of the candidates or no exit with equal probability. A coin
            flipped at every candidate would hardly ever reach the deep ones.
        seed: Seed of the decisions and matches, one stream a prompt; None for the store's.
        candidates: Candidate layers; None for the store's.
        features: Observation; None for the store's. Its `top_k` must be the store's, which is baked into the traces.
        reward: Reward; None for the store's.

    Raises:
        ValueError: The behaviour is unknown, or a setting does not fit the traces.
    """
    if behaviour != "uniform":
        raise ValueError(f"behaviour must be 'uniform', got '{behaviour}'; to follow a policy use `play`")
    settings = playback_settings(store.settings, seed, candidates, features, reward)
    options = np.asarray((0, *settings.candidates))
    rollouts = []
    for trace in store:
        rng = numpy_stream(settings.seed, Purpose.SYNTHESIS, trace.prompt_index)
        exits = options[rng.integers(0, options.size, size=trace.n_decided)]
        rollouts.append(replay(trace, exits, settings, rng))
    return TransitionStore(replace(settings, explore=behaviour), rollouts)


def play(
    traces: Iterable[PromptTrace],
    greedy: Greedy,
    settings: StoreSettings,
    epsilon: float = 0.0,
) -> list[PromptRollout]:
    """Act out a policy on traces, all prompts at once: one call of the policy a token and candidate set.

    Args:
        traces: Full information, one a prompt.
        greedy: The policy's actions `(row,)` for observations `(row, feature)`; a token exits at the first candidate
            where it says exit.
        settings: Candidates, features, reward, sizes of the model, and the seed of exploration and matches.
        epsilon: Share of tokens, drawn a token at a time, that exit at a uniform candidate or nowhere instead.
    """
    prompts = list(traces)
    settings.features.check_token_level("playback")
    candidates = np.asarray(settings.candidates)
    told = [text_values(trace, candidates) for trace in prompts]
    named = {"depth", *settings.features.names} - {"trace"}  # `depth` in any case: it tells the number of candidates
    # the 1 keeps these apart from the streams of `synthesize`
    streams = [numpy_stream(settings.seed, Purpose.SYNTHESIS, trace.prompt_index, 1) for trace in prompts]
    options = np.asarray((0, *settings.candidates))
    explores = [rng.random(trace.n_decided) < epsilon for trace, rng in zip(prompts, streams, strict=True)]
    uniform = [
        options[rng.integers(0, options.size, size=trace.n_decided)]
        for trace, rng in zip(prompts, streams, strict=True)
    ]
    running = [ConfidenceTrace(trace.anchor, settings.features.window) for trace in prompts]
    exits = [np.zeros(trace.n_decided, dtype=np.int64) for trace in prompts]
    for t in range(max((trace.n_decided for trace in prompts), default=0)):
        alive = [i for i, trace in enumerate(prompts) if t < trace.n_decided]
        values = {name: np.stack([told[i][name][t] for i in alive]) for name in named}
        values["trace"] = np.asarray([running[i].value() for i in alive])[:, None]
        # (prompt, candidate, feature)
        observations = settings.features.observe(values, settings.n_layers, settings.vocab_size)
        actions = np.asarray(greedy(observations.reshape(-1, observations.shape[-1])))
        wants = actions.reshape(len(alive), candidates.size) == EXIT
        chosen = np.where(wants.any(axis=1), candidates[wants.argmax(axis=1)], 0)
        for i, layer in zip(alive, chosen, strict=True):
            exits[i][t] = uniform[i][t] if explores[i][t] else layer
            running[i].push(-float(prompts[i].top1[t, exits[i][t] - 1]))  # 0 - 1 is the last layer
    return [replay(trace, layers, settings, rng) for trace, layers, rng in zip(prompts, exits, streams, strict=True)]


def text_values(trace: PromptTrace, candidates: npt.NDArray[np.integer]) -> dict[str, npt.NDArray[np.float32]]:
    """Features at every decision that depend on the text alone, `(token, candidate)` each; `depth` is the same for all.

    Args:
        trace: Full information about the prompt.
        candidates: Candidate layers, ascending.
    """
    return _text_values(trace.confidence, trace.entropy, trace.top1, trace.top2, trace.token, candidates)


def closing_values(trace: PromptTrace, candidates: npt.NDArray[np.integer]) -> dict[str, npt.NDArray[np.float32]]:
    """The same for the state after the last decision, `(candidate,)` each; without meaning when EOS ended the text.

    Args:
        trace: Full information about the prompt.
        candidates: Candidate layers, ascending.
    """
    return _text_values(
        trace.closing_confidence,
        trace.closing_entropy,
        trace.closing_top1,
        trace.closing_top2,
        trace.closing_token,
        candidates,
    )


def trace_feature(trace: PromptTrace, exit_layers: npt.NDArray[np.integer], window: int) -> npt.NDArray[np.float64]:
    """C_trace before every decision and after the last, `(token,)`, in nats; see `lede.features.ConfidenceTrace`.

    Args:
        trace: Full information about the prompt.
        exit_layers: Where each decided token exits, `(token - 1,)`, or 0.
        window: Positions that count.
    """
    n = trace.n_decided
    left = np.where(exit_layers > 0, exit_layers, trace.n_layers) - 1
    surprisal = -trace.top1[np.arange(n), left].astype(np.float64)
    sums = np.concatenate(([0.0], np.cumsum(surprisal)))
    end = np.arange(n + 1)
    start = np.maximum(end - window, 0)
    mean = (sums[end] - sums[start]) / np.maximum(end - start, 1)
    mean[0] = trace.anchor
    return np.asarray(mean, dtype=np.float64)


def playback_settings(
    settings: StoreSettings,
    seed: int | None = None,
    candidates: Sequence[int] | None = None,
    features: FeatureConfig | None = None,
    reward: RewardConfig | None = None,
) -> StoreSettings:
    """Settings of transitions played on traces: the store's, but for what is given.

    Raises:
        ValueError: The candidates are outside 1..L-1, or `top_k` differs from what the traces were made with.
    """
    features = features or settings.features
    if features.top_k != settings.features.top_k:
        raise ValueError(
            f"the traces hold `confidence` with top_k {settings.features.top_k}, not {features.top_k}: "
            "collect traces with that top_k"
        )
    return replace(
        settings,
        kind="transitions",
        seed=settings.seed if seed is None else seed,
        candidates=parse_candidates(candidates or settings.candidates, settings.n_layers),
        features=features,
        reward=reward or settings.reward,
    )


def _text_values(
    confidence: npt.NDArray[np.float32],
    entropy: npt.NDArray[np.float32],
    top1: npt.NDArray[np.float32],
    top2: npt.NDArray[np.float32],
    token: npt.NDArray[np.int32],
    candidates: npt.NDArray[np.integer],
) -> dict[str, npt.NDArray[np.float32]]:
    """Features `(..., candidate)` of primitives `(..., layer)`."""
    columns, n_layers = np.asarray(candidates) - 1, top1.shape[-1]
    top1, token = top1[..., columns], token[..., columns]
    agreement = np.zeros(top1.shape, dtype=np.float32)  # 0 at the first candidate, which has none before it
    agreement[..., 1:] = np.where(token[..., 1:] == token[..., :-1], 1.0, -1.0)
    return {
        "confidence": confidence[..., columns],
        "entropy": entropy[..., columns],
        "surprisal": -top1,
        "margin": top1 - top2[..., columns],
        "agreement": agreement,
        "depth": np.broadcast_to((columns + 1) / n_layers, top1.shape).astype(np.float32),
    }


def _check(trace: PromptTrace, exits: npt.NDArray[np.int64], settings: StoreSettings) -> None:
    if trace.n_layers != settings.n_layers:
        raise ValueError(f"the trace has {trace.n_layers} layers, the settings say {settings.n_layers}")
    if exits.shape != (trace.n_decided,):
        raise ValueError(f"exit_layers has shape {exits.shape}, the trace decides {trace.n_decided} tokens")
    odd = np.setdiff1d(exits, (0, *settings.candidates))
    if odd.size:
        raise ValueError(
            f"exit layers must be candidates {list(settings.candidates)} or 0 for no exit, got {odd.tolist()}"
        )


def _draw_matches(
    trace: PromptTrace, exits: npt.NDArray[np.int64], settings: StoreSettings, rng: np.random.Generator | None
) -> npt.NDArray[np.bool_]:
    """Whether each token's exit matches, `(token - 1,)`; without an exit, False."""
    tokens = np.arange(trace.n_decided)
    chance = np.where(exits > 0, trace.match[tokens, exits - 1], 0.0)
    uncertain = np.flatnonzero((chance > 0) & (chance < 1))
    draws = np.zeros(trace.n_decided)
    if rng is not None:
        draws = rng.random(trace.n_decided)
    else:
        for t in uncertain.tolist():
            draws[t] = numpy_stream(settings.seed, Purpose.MATCHES, trace.prompt_index, t + 1).random()
    return np.asarray(draws < chance, dtype=np.bool_)


def _final_observation(
    trace: PromptTrace, observations: npt.NDArray[np.float32], running: float, settings: StoreSettings
) -> npt.NDArray[np.float32]:
    if trace.ended_by_eos and len(observations):
        return np.asarray(observations[-1])
    values = {**closing_values(trace, np.asarray(settings.candidates)), "trace": np.asarray(running)}
    seen = settings.features.observe(values, settings.n_layers, settings.vocab_size)  # (candidate, feature)
    return np.asarray(seen[0])  # the token is entered, not decided: its first candidate is in view
