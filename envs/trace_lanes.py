"""The exit process played on traces, over many lanes at once."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from lede.envs.episodes import INFO_KEYS, EpisodeKind, PromptOrder
from lede.envs.prompt_queue import PromptQueue
from lede.envs.stream_draws import first_draws
from lede.envs.trace_source import TraceSource
from lede.rewards import EXIT
from lede.seeding import Purpose

Lanes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Outcomes = tuple[npt.NDArray[np.float64], Flags, Flags]
"""Rewards, and whether the episodes terminated or were truncated, `(lane,)` each."""


class TraceLanes:
    """`n_lanes` lanes, each playing one prompt's trace; both environments are thin around it.

    What an observation holds beside the trace feature depends on the text alone, so it is laid out beforehand:
    `(row, candidate, feature)`, one row a decided token, then one a prompt for the state after its last decision.

    Args:
        source: Traces and settings.
        episode: One token or a whole prompt.
        order: Of the prompts.
        n_lanes: Lanes.

    Raises:
        ValueError: A setting is out of range, or a feature is of rounds, not of tokens.
    """

    def __init__(self, source: TraceSource, episode: EpisodeKind, order: PromptOrder, n_lanes: int) -> None:
        if episode not in get_args(EpisodeKind):
            raise ValueError(f"episode must be one of {', '.join(get_args(EpisodeKind))}, got '{episode}'")
        if n_lanes < 1:
            raise ValueError(f"num_envs must be at least 1, got {n_lanes}")
        settings, table = source.settings, source.table
        settings.features.check_token_level("the exit process")
        self.settings = settings
        self.episode = episode
        self.n_lanes = n_lanes
        self._table = table
        self._queue = PromptQueue(table.n_prompts, order)
        self._lay_out(source)
        shape = (n_lanes,)
        self.observations = np.zeros((n_lanes, len(settings.features.names)), dtype=np.float32)
        self.infos = {key: np.zeros(shape, dtype=np.int64) for key in INFO_KEYS}
        self.ended = np.ones(shape, dtype=np.bool_)  # lanes whose next call must be `move_on`
        self._seed = 0
        self._prompt = np.zeros(shape, dtype=np.int64)  # place in the table
        self._stream = np.zeros(shape, dtype=np.int64)  # names the visit's random streams
        self._row = np.zeros(shape, dtype=np.int64)
        self._remaining = np.zeros(shape, dtype=np.int64)  # tokens to decide, the present one included
        self._candidate = np.zeros(shape, dtype=np.int64)
        self._between = np.ones(shape, dtype=np.bool_)  # the token is decided, the next one not entered
        self._recent = np.zeros((n_lanes, settings.features.window))  # surprisals where positions were left
        self._n_left = np.zeros(shape, dtype=np.int64)
        self._trace = np.zeros(shape)

    @property
    def bounds(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Lowest and highest observation, `(feature,)` each."""
        return self.settings.features.bounds(self.settings.n_layers, self.settings.vocab_size)

    def start_over(self, rng: np.random.Generator, seed: int | None) -> None:
        """Forget everything and put every lane at the start of a prompt.

        Args:
            rng: Orders the prompts.
            seed: Of the matches; None draws one from `rng`.
        """
        self._seed = int(rng.integers(2**31)) if seed is None else seed
        self._queue.start_over()
        self._next_prompts(np.arange(self.n_lanes), rng)

    def move_on(self, lanes: Lanes, rng: np.random.Generator) -> None:
        """Start the next episode of lanes: the next token if the prompt has one and episodes are tokens, else a prompt.

        A token that is left undecided passes through the rest of the layers without an exit.
        """
        stays = np.zeros(lanes.shape, dtype=np.bool_)
        if self.episode == "token":
            undecided = lanes[~self._between[lanes] & (self._remaining[lanes] > 0)]
            self._leave(undecided, self._surprisal[self._row[undecided], -1])
            stays = self._remaining[lanes] > 0
            self._enter(lanes[stays])
        self._next_prompts(lanes[~stays], rng)

    def step(self, lanes: Lanes, actions: npt.NDArray[np.integer]) -> Outcomes:
        """Act on lanes whose episode goes on; observations and infos change in place."""
        row, candidate = self._row[lanes], self._candidate[lanes]
        exits = actions == EXIT
        leaves = exits | (candidate == len(self._layers) - 1)
        match = self._matches(lanes, row, candidate, exits)
        rewards = np.where(exits, self._exit_reward[candidate, match], self._going_on[leaves.astype(np.int64)])
        target = np.where(leaves, self._target[row], -1)
        left = lanes[leaves]
        self._leave(left, self._surprisal[row[leaves], np.where(exits, candidate, -1)[leaves]])
        self._candidate[lanes[~leaves]] += 1
        if self.episode == "token":
            terminated, truncated = leaves, np.zeros(lanes.shape, dtype=np.bool_)
        else:
            over = leaves & (self._remaining[lanes] == 0)
            by_eos = self._table.ended_by_eos[self._prompt[lanes]]
            terminated, truncated = over & by_eos, over & ~by_eos
            cut = lanes[truncated]
            self._row[cut] = self._closing_row + self._prompt[cut]
            self._enter(lanes[leaves & ~terminated])
        # a terminated episode has no next state: its last one stays in view
        self._show(lanes[~leaves])
        self.ended[lanes] = terminated | truncated
        self.infos["exit_layer"][lanes] = np.where(exits, self._layers[candidate], 0)
        self.infos["match"][lanes] = match
        self.infos["target_token"][lanes] = target
        return rewards, terminated, truncated

    def _lay_out(self, source: TraceSource) -> None:
        """Tables of all that can be looked up."""
        from lede.buffers.playback import closing_values, text_values

        settings, table, traces = source.settings, source.table, source.traces
        features, reward = settings.features, settings.reward
        self._layers = np.asarray(settings.candidates, dtype=np.int64)
        columns = self._layers - 1
        sizes = (settings.n_layers, settings.vocab_size)
        decided = [features.observe(text_values(trace, self._layers), *sizes) for trace in traces]
        closing = [features.observe(closing_values(trace, self._layers), *sizes)[None] for trace in traces]
        self._told = np.concatenate([*decided, *closing])
        self._closing_row = len(table.match)
        self._trace_column = features.names.index("trace") if "trace" in features.names else None
        low, high = self.bounds
        self._trace_bounds = (
            (0.0, 0.0) if self._trace_column is None else (low[self._trace_column], high[self._trace_column])
        )
        self._surprisal = -table.top1[:, [*columns, settings.n_layers - 1]].astype(np.float64)
        self._target = np.concatenate([trace.token_ids[1:] for trace in traces])
        self._chance = table.match[:, columns].astype(np.float64)
        self._certain = bool(((self._chance == 0) | (self._chance == 1)).all())
        self._exit_reward = reward.exit(self._layers[:, None], settings.n_layers, [0, 1]).astype(np.float64)
        self._going_on = reward.going_on([False, True]).astype(np.float64)

    def _matches(self, lanes: Lanes, row: Lanes, candidate: Lanes, exits: Flags) -> Lanes:
        """Whether each exit's token is the target's, 0 or 1; -1 without an exit.

        With sampling the draws are the live environment's: one stream for every visit of a prompt and token.
        """
        chance = self._chance[row, candidate]
        match = (chance > 0.5).astype(np.int64)
        if not self._certain:
            open_ = np.flatnonzero(exits)
            drawing = lanes[open_]
            draws = first_draws(self._seed, Purpose.MATCHES, self._stream[drawing], self._token_index(drawing))
            match[open_] = draws < chance[open_]
        return np.where(exits, match, -1)

    def _token_index(self, lanes: Lanes) -> Lanes:
        return np.asarray(self._table.n_decided[self._prompt[lanes]] - self._remaining[lanes] + 1)

    def _leave(self, lanes: Lanes, surprisal: npt.NDArray[np.float64]) -> None:
        """Go past the present token of lanes, whose likeliest token had this -log probability where it was left."""
        self._recent[lanes, self._n_left[lanes] % self._recent.shape[1]] = surprisal
        self._n_left[lanes] += 1
        self._row[lanes] += 1
        self._remaining[lanes] -= 1
        self._between[lanes] = True

    def _enter(self, lanes: Lanes) -> None:
        """Take lanes to the first candidate of their present token."""
        n_left = self._n_left[lanes]
        mean = self._recent[lanes].sum(axis=1) / np.clip(n_left, 1, self._recent.shape[1])
        self._trace[lanes] = np.where(n_left > 0, mean, self._table.anchor[self._prompt[lanes]])
        self._candidate[lanes] = 0
        self._between[lanes] = False
        self._show(lanes)

    def _next_prompts(self, lanes: Lanes, rng: np.random.Generator) -> None:
        """Put lanes at the start of the next prompts; a prompt without a decision is passed over."""
        table, waiting = self._table, lanes
        last_index = int(table.prompt_index.max())
        while waiting.size:
            numbers = self._queue.take(waiting.size, rng)
            passes, self._prompt[waiting] = np.divmod(numbers, table.n_prompts)
            self._stream[waiting] = passes * (last_index + 1) + table.prompt_index[self._prompt[waiting]]
            waiting = waiting[table.n_decided[self._prompt[waiting]] == 0]
        prompt = self._prompt[lanes]
        self._row[lanes], self._remaining[lanes] = table.first_row[prompt], table.n_decided[prompt]
        self._recent[lanes] = 0
        self._n_left[lanes] = 0
        self._enter(lanes)

    def _show(self, lanes: Lanes) -> None:
        """Put what lanes see where they stand into the observations and infos."""
        prompt, candidate = self._prompt[lanes], self._candidate[lanes]
        seen = self._told[self._row[lanes], candidate]
        if self._trace_column is not None:
            seen[:, self._trace_column] = np.clip(self._trace[lanes], *self._trace_bounds)
        self.observations[lanes] = seen
        self.ended[lanes] = False
        self.infos["prompt_index"][lanes] = self._table.prompt_index[prompt]
        self.infos["token_index"][lanes] = self._token_index(lanes)
        self.infos["layer"][lanes] = self._layers[candidate]
        self.infos["exit_layer"][lanes] = 0
        self.infos["match"][lanes] = self.infos["target_token"][lanes] = -1
