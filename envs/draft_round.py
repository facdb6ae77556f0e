"""`lede/DraftRound-v0`: decoding as deployment runs it, paid in tokens and charged in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from lede.envs.episodes import PromptOrder
from lede.envs.round_lanes import EpisodeUnit, Profile, RoundLanes
from lede.features import FeatureConfig

if TYPE_CHECKING:
    from lede.envs.trace_source import Traces

Observation = npt.NDArray[np.float32]

_LANE = np.zeros(1, dtype=np.int64)


class DraftRoundEnv(gymnasium.Env[Observation, np.int64]):
    """Self-speculative decoding of a large language model as a Markov decision process in seconds.

    ## Description
    A language model of L layers decodes a prompt in rounds. Before a round (pre-scan) the agent skips the draft and
    takes a plain pass, looks at the first candidate layer, or drafts blind at one of the candidates. In the scan the
    newest token goes from candidate to candidate until the agent exits, or through all layers. In the draft each
    further token goes through the layers up to the exit, and the agent drafts on or stops. Then the layers above the
    exit verify the draft in one pass: they keep its longest right beginning and add a token of their own.

    The texts are recorded traces, and seconds come from a cost profile, so that a step is a look-up: no model runs.
    After a wrong draft the drafter is on a text of its own; there the agent sees the branches of the traces if they
    have any, else what it would have seen on the right text.

    Departs from LEDE (arXiv 2606.03113), section 3.1: its process ends with the token, pays layers and does not know
    what an inspection or a verification costs.

    ## Action Space
    `Discrete(2 + K + K * F)` for K candidates and F fixed lengths, none unless given. Illegal actions raise;
    `info["action_mask"]` has the legal ones, and `env.action_space.sample(info["action_mask"])` draws one.

    | action | pre-scan | scan | draft |
    |---|---|---|---|
    | 0 | skip: a plain pass | go on; past the last candidate: a plain pass through the rest | stop and verify |
    | 1 | scan: look at the first candidate | exit here: draft the likeliest token | draft on |
    | 2 + k | draft blind at candidate k | - | - |
    | 2 + K + k * F + f | the whole round: a draft of fixed length f at candidate k, then verify | - | - |

    At the cap of `max_draft` tokens, or one short of the budget, the draft ends unasked; so it does with a drafted
    end-of-sequence token that is right.

    ## Observation Space
    `Box` of float32, one number a feature: `lede.features.WALL_CLOCK_FEATURES` unless `features` names others;
    `lede.features.FEATURES` has formulas, stages and bounds. A feature is 0 in a stage that does not define it. None
    depends on a match before the verification that finds it out. Without `in_scan` the stages look alike: then, as in
    decoding, the pre-scan only scans.

    ## Rewards
    tokens - rate * seconds: seconds when an action spends them, the policy's own time included, and tokens when
    verification commits them. With `rate` the tokens a second of a policy (Dinkelbach's method), the sum over a prompt
    is what is gained against that policy, and the best policy for the rate it has itself decodes fastest. Use no
    discount: gamma is 1.

    ## Starting State
    The pre-scan of a prompt's first round, nothing drafted yet. Prompts come in passes, each in a new order from
    `np_random`, or in the order given; a prompt whose text ends with its first token is passed over.

    `reset()` goes to the next episode; a round left undecided then drafts no more. `reset(seed=...)` starts all over.
    For sampled texts it also draws which drafts are accepted, once for each position of each prompt.

    ## Episode End
    Termination:

    1. `episode="prompt"`: the text has ended, by EOS or at the budget. The budget terminates and does not truncate:
       decoding ends there, and nothing is earned or spent beyond it.
    2. `episode="round"`: the round has ended. `reset()` goes on with the next round of the text. This is the cheaper
       approximation: rounds are short, and all that a round means for later ones is the time it takes, at the price
       `rate`; what it does to their states is left out.

    Nothing is truncated. A terminated episode has no next state and returns its last observation again.

    The info has `prompt_index`, `stage` (0 pre-scan, 1 scan, 2 draft), `layer` (0 in the pre-scan) and `action_mask`
    (int8) of the observation; `tokens` committed and `seconds` spent by the step just taken; and where that step ended
    a round, the `n_drafted` and `n_accepted` tokens of it, else -1. A plain pass that the budget forces without asking
    counts towards the step before.

    ## Arguments
    - `traces`: folder of a store of traces, a `lede.buffers.TraceStore`, or a sequence of `PromptTrace`.
    - `profile`: file of `lede profile`, a `CostProfile` or a `CostModel`, of the model of the traces.
    - `candidates`: layers such as `(2, 4, 8)`, "2,4,8" or "all"; None for those of the store, and for traces in memory
      multiples of ceil(L/8) up to L/2.
    - `features`: see above.
    - `max_draft`: most tokens drafted in a round.
    - `rate`: price of a second in tokens; None for the rate of plain decoding on these texts. `set_rate` changes it.
    - `episode`: "prompt" or "round".
    - `order`: "shuffled" or "sequential".
    - `vocab_size`: entries of the vocabulary; needed for traces in memory alone, which do not tell. Those also count as
      collected with the longest text as budget.
    - `fixed_lengths`: lengths of drafts that are made without asking or looking, ascending, at most `max_draft`.

    `gymnasium.make_vec("lede/DraftRound-v0", num_envs=n)` gives `DraftRoundVectorEnv`, which steps n lanes at once.

    ## Version History
    - v0: first version; `fixed_lengths`, empty by default, came later. `lede/DraftRound-v1` adds drafts copied from
      the text (`DraftSourceEnv`).
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # gymnasium calls it no ClassVar

    def __init__(
        self,
        traces: Traces,
        profile: Profile,
        candidates: str | Sequence[int] | None = None,
        features: FeatureConfig | None = None,
        max_draft: int = 12,
        rate: float | None = None,
        episode: EpisodeUnit = "prompt",
        order: PromptOrder = "shuffled",
        vocab_size: int | None = None,
        render_mode: str | None = None,
        fixed_lengths: Sequence[int] = (),
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"nothing is rendered; leave out render_mode, got '{render_mode}'")
        lanes = RoundLanes(
            traces, profile, candidates, features, max_draft, rate, episode, order, vocab_size, 1,
            fixed_lengths=fixed_lengths,
        )  # fmt: skip
        self._begin(lanes)

    def _begin(self, lanes: RoundLanes) -> None:
        """Take over a lane that nobody has stepped yet."""
        self.lanes = lanes
        self.observation_space = spaces.Box(*self.lanes.bounds, dtype=np.float32)
        self.action_space = spaces.Discrete(self.lanes.n_actions)
        self._fresh = True

    @property
    def rate(self) -> float:
        """Price of a second in tokens."""
        return self.lanes.rate

    def set_rate(self, rate: float | None) -> None:
        """Set the price of a second from the next step on; None for the rate of plain decoding.

        Raises:
            ValueError: It is no positive number.
        """
        self.lanes.set_rate(rate)

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
        return self._view()

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Decide in the stage in view.

        Raises:
            ValueError: The action is not legal there.
            gymnasium.error.ResetNeeded: The episode is over, or none was begun.
        """
        if self.lanes.ended[0]:
            raise ResetNeeded("the episode is over; call reset() before the next step()")
        if not self.action_space.contains(action) or not self.lanes.infos["action_mask"][0, action]:
            raise ValueError(f"action {action!r} is not among the legal actions; {self.lanes.legal_actions(0)}")
        rewards, terminated = self.lanes.step(_LANE, np.asarray([action]))
        observation, info = self._view()
        return observation, float(rewards[0]), bool(terminated[0]), False, info

    def _view(self) -> tuple[Observation, dict[str, Any]]:
        self.lanes.look()
        infos = self.lanes.infos
        told = {key: values[0].copy() if values.ndim > 1 else values[0].item() for key, values in infos.items()}
        return self.lanes.observations[0].copy(), told
