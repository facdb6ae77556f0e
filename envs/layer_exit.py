"""`lede/LayerExit-v0`: when to leave the stack of layers, one decision at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from lede.envs.episodes import EpisodeKind, Episodes, ModelSource, PromptOrder, PromptSource
from lede.features import FeatureConfig
from lede.prompts import Chat
from lede.rewards import RewardConfig

Observation = npt.NDArray[np.float32]


class LayerExitEnv(gymnasium.Env[Observation, np.int64]):
    """Early exit of a large language model as a Markov decision process.

    ## Description
    A language model of L layers writes a text. At every token the agent looks at the state after the first candidate
    layer, read through the model's final norm and head, and decides whether the layers so far are enough to predict the
    next token. If so, the token is drafted there (exit); if not, it goes on to the next candidate. The text is always
    the whole model's: the agent is paid for predicting it early, and cannot change it.

    The environment is live: a step runs the layers up to the next candidate and no further, and once a token is left
    the rest of them, since the whole model says what the exit was worth.

    Source: LEDE (arXiv 2606.03113), section 3.1. Departs from the paper: the feature `depth`; the settings of
    `confidence` and `trace`, which are not published; prompt episodes.

    ## Action Space
    `Discrete(2)`

    | action | meaning |
    |---|---|
    | 0 | continue to the next candidate layer; at the last one, give up drafting this token |
    | 1 | exit here: draft the likeliest token of this layer |

    ## Observation Space
    `Box` of float32, by default of shape `(4,)`. Logarithms are natural and come from raw logits (temperature 1).
    Values are clipped to the bounds. V is the size of the vocabulary.

    | index | name | min | max | meaning |
    |---|---|---|---|---|
    | 0 | confidence | 0 | 50 | C_k, minus the mean log-probability of the k likeliest tokens; large when peaked |
    | 1 | entropy | 0 | ln V | entropy of the next token, in nats |
    | 2 | trace | 0 | 50 | mean of -log top-1 probability of the last w positions, each at the layer where it was left |
    | 3 | depth | 1/L | 1 | layers so far over L |

    Before the first position the trace is the layer-L value of the last prompt position. k is `features.top_k` (5) and
    w `features.window` (8); `features.names` chooses and orders the features.

    ## Rewards
    With l the layer and L the number of layers:

    - exit, and the target's token agrees: 1 + (L - l) / L
    - exit, and it does not: -2 + (L - l) / L
    - continue: -0.01; at the last candidate `reward.final_reward` (0) is added

    When the target is sampled (`temperature` above 0), an exit agrees with probability sum_v min(p(v), q(v)), the
    acceptance probability of speculative sampling.

    ## Starting State
    A prompt is prefilled through all layers and yields the first new token without a decision. The first state is the
    second new token's at the first candidate. Prompts come in passes, each in a new order from `np_random`, or in the
    order given; a prompt that the target ends with its first token is passed over.

    `reset()` goes to the next episode: the next token or, when the prompt is through or episodes are prompts, the next
    prompt. A token left undecided passes through the rest of the layers without an exit. `reset(seed=...)` starts all
    over.

    ## Episode End
    Termination:

    1. `episode="token"`: the token was decided, by an exit or by a continue at the last candidate.
    2. `episode="prompt"`: the target wrote an end-of-sequence token.

    Truncation:

    1. `episode="prompt"`: the prompt's budget `max_new_tokens` is used up. The observation is then the first
       candidate's at the next position. A terminated episode has no next state and returns its last observation again.

    The info has whole numbers: `prompt_index`, `token_index` (of the decided tokens of the prompt, from 1) and `layer`
    of the observation; `exit_layer` (0 for a continue), `match` (0 or 1, -1 for a continue) and `target_token` (-1
    while the token goes on) of the step just taken.

    ## Arguments
    - `model`: an `EarlyExitModel`, or what `lede.load_model` takes: "demo" (the bundled model), a folder, a hub id, a
      `(model, tokenizer)` pair.
    - `prompts`: texts, `lede.prompts.Prompt` or token ids; None for a few heads of Python files.
    - `candidates`: layers such as `(2, 4, 8)`, "2,4,8" or "all"; None for multiples of ceil(L/8) up to L/2.
    - `max_new_tokens`: budget of a prompt in tokens, at least 2.
    - `episode`: "token" or "prompt". A discount below 1 on prompt episodes has to count tokens, not decisions: per
      decision it would price one continue at (1 - discount) times the value of all that follows.
    - `features`, `reward`: see above.
    - `temperature`, `top_k`, `top_p`: of the target's text; greedy at 0.
    - `order`: "shuffled" or "sequential".
    - `chat`: "auto", "on" or "off"; whether texts go through the tokenizer's chat template.

    `gymnasium.make_vec("lede/LayerExit-v0", num_envs=n)` gives `LayerExitVectorEnv`, where n rows share one model and
    its forward passes. The vectorization modes "sync" and "async" would hold a copy of the model for every environment.

    ## Version History
    - v0: first version.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # gymnasium calls it no ClassVar

    def __init__(
        self,
        model: ModelSource = "demo",
        prompts: PromptSource | None = None,
        candidates: str | Sequence[int] | None = None,
        max_new_tokens: int = 64,
        episode: EpisodeKind = "token",
        features: FeatureConfig | None = None,
        reward: RewardConfig | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        order: PromptOrder = "shuffled",
        chat: Chat = "auto",
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"nothing is rendered; leave out render_mode, got '{render_mode}'")
        self.episodes = Episodes(
            model,
            prompts,
            candidates,
            max_new_tokens,
            episode,
            features,
            reward,
            temperature,
            top_k,
            top_p,
            order,
            chat,
            n_rows=1,
        )
        self.observation_space = spaces.Box(*self.episodes.bounds, dtype=np.float32)
        self.action_space = spaces.Discrete(2)
        self._fresh = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Go to the next episode; with a seed, start all over."""
        super().reset(seed=seed)
        if self._fresh or seed is not None:
            self.episodes.start_over(self.np_random, seed)
            self._fresh = False
        else:
            self.episodes.move_on([0], self.np_random)
        return self.episodes.observations[0].copy(), self.episodes.info(0)

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Continue (0) or exit (1) at the candidate in view.

        Raises:
            ValueError: The action is neither.
            gymnasium.error.ResetNeeded: The episode is over, or none was begun.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"the action must be 0 (continue) or 1 (exit), got {action!r}")
        if self.episodes.ended[0]:
            raise ResetNeeded("the episode is over; call reset() before the next step()")
        outcome = self.episodes.step({0: int(action)})[0]
        return (
            self.episodes.observations[0].copy(),
            outcome.reward,
            outcome.terminated,
            outcome.truncated,
            self.episodes.info(0),
        )
