"""`lede/TraceExit-v0`: the decisions of `lede/LayerExit-v0`, played on traces instead of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from lede.envs.episodes import EpisodeKind, PromptOrder
from lede.envs.trace_lanes import TraceLanes
from lede.envs.trace_source import TraceSource
from lede.features import FeatureConfig
from lede.rewards import RewardConfig

if TYPE_CHECKING:
    from lede.envs.trace_source import Traces

Observation = npt.NDArray[np.float32]

_LANE = np.zeros(1, dtype=np.int64)


class TraceExitEnv(gymnasium.Env[Observation, np.int64]):
    """Early exit of a large language model as a Markov decision process, without the model.

    ## Description
    A trace holds what every layer of a language model says about every token of a text that the whole model wrote.
    The text is the whole model's whatever the agent decides, so a trace answers every decision, and this environment
    is step for step that of `lede/LayerExit-v0` on the same prompts, at the price of a table look-up: at every token
    the agent looks at the state after the first candidate layer and decides whether the layers so far are enough to
    predict the next token. If so, the token is drafted there (exit); if not, it goes on to the next candidate.

    Traces come from the collector `teacher`.

    Source: LEDE (arXiv 2606.03113), section 3.1. Departs from the paper as `LayerExitEnv` does.

    ## Action Space
    `Discrete(2)`

    | action | meaning |
    |---|---|
    | 0 | continue to the next candidate layer; at the last one, give up drafting this token |
    | 1 | exit here: draft the likeliest token of this layer |

    ## Observation Space
    `Box` of float32, one number a feature: those of the traces unless `features` names others, by default
    `confidence`, `entropy`, `trace` and `depth`. Any of `lede.features.TEXT_FEATURES` may be named; the table of
    `LayerExitEnv` has formulas and bounds of the default ones, `lede.features.FEATURES` those of all.

    ## Rewards
    With l the layer and L the number of layers:

    - exit, and the target's token agrees: 1 + (L - l) / L
    - exit, and it does not: -2 + (L - l) / L
    - continue: -0.01; at the last candidate `reward.final_reward` (0) is added

    For sampled texts an exit agrees with the recorded acceptance probability sum_v min(p(v), q(v)). `reset(seed=s)`
    draws what the live environment draws after `reset(seed=s)`. Its texts are those of the traces if s is the seed that
    the traces were collected with; in later passes over the prompts the live environment samples new texts, and a
    trace stays what it is.

    ## Starting State
    The second new token of a prompt at the first candidate: the prefill yields the first one without a decision.
    Prompts come in passes, each in a new order from `np_random`, or in the order given; a prompt that the target ended
    with its first token is passed over.

    `reset()` goes to the next episode: the next token or, when the prompt is through or episodes are prompts, the next
    prompt. A token left undecided passes through the rest of the layers without an exit. `reset(seed=...)` starts all
    over.

    ## Episode End
    Termination:

    1. `episode="token"`: the token was decided, by an exit or by a continue at the last candidate.
    2. `episode="prompt"`: the target wrote an end-of-sequence token.

    Truncation:

    1. `episode="prompt"`: the budget of the traces is used up. The observation is then the first candidate's at the
       next position, of which traces hold `confidence` and `entropy`; `surprisal` and `margin` are 0 there. A
       terminated episode has no next state and returns its last observation again.

    The info has whole numbers: `prompt_index`, `token_index` (of the decided tokens of the prompt, from 1) and `layer`
    of the observation; `exit_layer` (0 for a continue), `match` (0 or 1, -1 for a continue) and `target_token` (-1
    while the token goes on) of the step just taken.

    ## Arguments
    - `traces`: folder of a store of traces, a `lede.buffers.TraceStore`, or a sequence of `PromptTrace`.
    - `candidates`: layers such as `(2, 4, 8)`, "2,4,8" or "all"; None for those of the store, and for traces in memory
      multiples of ceil(L/8) up to L/2.
    - `episode`: "token" or "prompt". A discount below 1 on prompt episodes has to count tokens, not decisions: per
      decision it would price one continue at (1 - discount) times the value of all that follows.
    - `features`, `reward`: see above; None for those of the store, or the defaults.
    - `order`: "shuffled" or "sequential".
    - `vocab_size`: entries of the vocabulary; needed for traces in memory alone, which do not tell.

    `gymnasium.make_vec("lede/TraceExit-v0", num_envs=n)` gives `TraceExitVectorEnv`, which steps n lanes at once.

    ## Version History
    - v0: first version.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # gymnasium calls it no ClassVar

    def __init__(
        self,
        traces: Traces,
        candidates: str | Sequence[int] | None = None,
        episode: EpisodeKind = "token",
        features: FeatureConfig | None = None,
        reward: RewardConfig | None = None,
        order: PromptOrder = "shuffled",
        vocab_size: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"nothing is rendered; leave out render_mode, got '{render_mode}'")
        source = TraceSource.load(traces, candidates, features, reward, vocab_size)
        self.lanes = TraceLanes(source, episode, order, n_lanes=1)
        self.observation_space = spaces.Box(*self.lanes.bounds, dtype=np.float32)
        self.action_space = spaces.Discrete(2)
        self._fresh = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Go to the next episode; with a seed, start all over."""
        super().reset(seed=seed)
        if self._fresh or seed is not None:
            self.lanes.start_over(self.np_random, seed)
            self._fresh = False
        else:
            self.lanes.move_on(_LANE, self.np_random)
        return self.lanes.observations[0].copy(), self._info()

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Continue (0) or exit (1) at the candidate in view.

        Raises:
            ValueError: The action is neither.
            gymnasium.error.ResetNeeded: The episode is over, or none was begun.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"the action must be 0 (continue) or 1 (exit), got {action!r}")
        if self.lanes.ended[0]:
            raise ResetNeeded("the episode is over; call reset() before the next step()")
        rewards, terminated, truncated = self.lanes.step(_LANE, np.asarray([action]))
        observation = self.lanes.observations[0].copy()
        return observation, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), self._info()

    def _info(self) -> dict[str, Any]:
        return {key: int(values[0]) for key, values in self.lanes.infos.items()}
