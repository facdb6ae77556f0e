"""`lede/DraftRound-v1`: the same decoding, where the agent also decides which source a draft comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lede.envs.draft_round import DraftRoundEnv
from lede.envs.draft_round_vector import DraftRoundVectorEnv
from lede.envs.episodes import PromptOrder
from lede.envs.round_lanes import EpisodeUnit, Profile, RoundLanes
from lede.features import FeatureConfig
from lede.lookup import LookupConfig
from lede.lookup_table import LOOKUP_LENGTHS
from lede.policies.base import Lookup
from lede.training_sources import Sources

if TYPE_CHECKING:
    from lede.envs.trace_source import Traces
    from lede.phrases import PhraseMemory


class DraftSourceEnv(DraftRoundEnv):
    """Self-speculative decoding whose drafts come from layers of the model or from the text, in seconds.

    ## Description
    `lede/DraftRound-v0` with one more choice before each round: to copy up to so many tokens from where the end of the
    text has been before (`lede.lookup`) and let all layers verify them in one pass. Copied tokens are a function of the
    text, so nothing has to be recorded for them. A lookup that finds nothing is a plain pass, and so is one of which
    the pruning layer keeps nothing.

    ## Action Space
    `Discrete(2 + K + J + K * F)` for K candidates, J lookups and F fixed lengths; `info["action_mask"]` has the legal
    ones.

    | action | pre-scan | scan | draft |
    |---|---|---|---|
    | 0 | skip: a plain pass | go on; past the last candidate: a plain pass through the rest | stop and verify |
    | 1 | scan: look at the first candidate; illegal without candidates | exit here | draft on |
    | 2 + k | draft blind at candidate k | - | - |
    | 2 + K + j | the whole round by lookup j | - | - |
    | 2 + K + J + k * F + f | the whole round: a draft of fixed length f at candidate k, then verify | - | - |

    ## Observation Space
    That of v0, with `lede.features.LOOKUP_FEATURES` among the defaults: what matches the end of the text, and how
    lookups have fared. With `sources="lookup"` there is no stage but the pre-scan, and the default is those and the
    confidence trace.

    ## Rewards
    tokens - rate * seconds, as in v0. The index of the text is charged with every token, where a profile has its cost.

    ## Starting State
    The pre-scan of a prompt's first round, as in v0.

    ## Episode End
    As in v0. The info has in addition `source` where the step ended a round, 0 for a plain pass, 1 for layers and 2 for
    a lookup, else -1; `n_drafted` and `n_accepted` count tokens of either source.

    ## Arguments
    Those of v0, and

    - `sources`: "exit,lookup", "lookup" (no layer ever drafts) or "exit" (v0).
    - `lookup`: how the text is searched, a `LookupConfig`.
    - `lookups`: what may be copied: lengths, or `lede.policies.base.Lookup` with a layer that prunes.
    - `memory`: phrases of other texts (`lede.phrases.PhraseMemory`), for where a text has nothing of its own; adds
      `match_remembered` to the default observation. Give it texts other than those of the traces.

    `gymnasium.make_vec("lede/DraftRound-v1", num_envs=n)` gives `DraftSourceVectorEnv`.

    ## Version History
    - v1: lookups. v0 is the same without.
    """

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
        sources: Sources = "exit,lookup",
        lookup: LookupConfig | None = None,
        lookups: Sequence[int | Lookup] = LOOKUP_LENGTHS,
        memory: PhraseMemory | None = None,
        fixed_lengths: Sequence[int] = (),
    ) -> None:
        _check_render_mode(render_mode)
        texts = {**_texts(sources, lookup, lookups, memory), "fixed_lengths": fixed_lengths}
        lanes = RoundLanes(
            traces, profile, candidates, features, max_draft, rate, episode, order, vocab_size, 1, **texts
        )
        self._begin(lanes)


class DraftSourceVectorEnv(DraftRoundVectorEnv):
    """`num_envs` lanes of `DraftSourceEnv`; see there, and `DraftRoundVectorEnv` for what is batched how."""

    def __init__(
        self,
        num_envs: int,
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
        sources: Sources = "exit,lookup",
        lookup: LookupConfig | None = None,
        lookups: Sequence[int | Lookup] = LOOKUP_LENGTHS,
        memory: PhraseMemory | None = None,
        fixed_lengths: Sequence[int] = (),
    ) -> None:
        _check_render_mode(render_mode)
        texts = {**_texts(sources, lookup, lookups, memory), "fixed_lengths": fixed_lengths}
        lanes = RoundLanes(
            traces, profile, candidates, features, max_draft, rate, episode, order, vocab_size, num_envs, **texts
        )
        self._begin(lanes)


def _texts(
    sources: str, lookup: LookupConfig | None, lookups: Sequence[int | Lookup], memory: PhraseMemory | None
) -> dict[str, Any]:
    """What `RoundLanes` needs to know of drafts from the text.

    Raises:
        ValueError: There is no such source, or nothing may be copied.
    """
    named = sources.split(",")
    if sorted(set(named)) != sorted(named) or not set(named) <= {"exit", "lookup"}:
        raise ValueError(f"sources must be 'exit', 'lookup' or 'exit,lookup', got '{sources}'")
    if "lookup" not in named:
        return {}
    plans = tuple(each if isinstance(each, Lookup) else Lookup(each) for each in lookups)
    if not plans or len(set(plans)) != len(plans):
        raise ValueError(f"lookups must be distinct, at least one, got {list(lookups)}")
    return {"lookup": lookup or LookupConfig(), "lookups": plans, "exits": "exit" in named, "memory": memory}


def _check_render_mode(render_mode: str | None) -> None:
    if render_mode is not None:
        raise ValueError(f"nothing is rendered; leave out render_mode, got '{render_mode}'")
