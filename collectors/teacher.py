"""The teacher: writes each text once and reads every layer at every token on the way.

From a share of the wrong drafts that this shows, it rolls the drafter on (see `lede.collectors.branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from lede.buffers.records import CLOSING_DTYPES, PromptTrace
from lede.cache import KVCache
from lede.collectors.branch_walk import Arrays
from lede.collectors.branches import BranchRules, Lesson, grow_branches
from lede.collectors.head_table import read_heads, unpacked
from lede.collectors.host_copies import fetch, send
from lede.collectors.rollout import NumberedPrompt
from lede.collectors.teacher_batch import TeacherBatch
from lede.collectors.texts import TaughtText, Text
from lede.envs import Rules
from lede.models import EarlyExitModel


def collect_teacher(
    model: EarlyExitModel,
    prompts: Sequence[NumberedPrompt],
    rules: Rules,
    seed: int = 0,
    batch_size: int = 8,
    on_tokens: Callable[[int], None] | None = None,
    branching: BranchRules | None = None,
) -> Iterator[PromptTrace]:
    """Generate from prompts, `batch_size` of them at a time, and yield each one's full information.

    Args:
        model: The model.
        prompts: Prompt index and token ids; the index names the streams.
        rules: Budget, warp, `features.top_k`, and for branches the candidates; rewards play no part in a trace.
        seed: Of the target's draws and of the branches.
        batch_size: Prompts that share forward passes.
        on_tokens: Called with the number of new tokens whenever some were written.
        branching: Which wrong drafts get a branch; None for no branches.
    """
    for start in range(0, len(prompts), batch_size):
        yield from _teach(model, prompts[start : start + batch_size], rules, seed, on_tokens, branching)


@torch.inference_mode()
def _teach(
    model: EarlyExitModel,
    prompts: Sequence[NumberedPrompt],
    rules: Rules,
    seed: int,
    on_tokens: Callable[[int], None] | None,
    branching: BranchRules | None,
) -> list[PromptTrace]:
    batch = TeacherBatch(model, prompts, rules, seed, keep_states=_wants_states(rules, branching))
    batch.write(on_tokens)
    traces = _traces(model, rules, batch.taught(), batch.cache, seed, branching)
    return [traces[batch.places.index(number)] for number in range(len(prompts))]


@torch.inference_mode()
def read_traces(
    model: EarlyExitModel, texts: Sequence[Text], rules: Rules, seed: int = 0, branching: BranchRules | None = None
) -> list[PromptTrace]:
    """Full information about finished texts from one teacher-forced pass over all of them, wherever they come from.

    Args:
        model: The model, which must have written the texts: a last layer that would have written another token is
            taken to match all the same.
        texts: The texts.
        rules: As in `collect_teacher`.
        seed: Of the branches.
        branching: Which wrong drafts get a branch; None for no branches.
    """
    wholes = [[*text.prompt_ids, *(text.token_ids[:-1] if text.ended_by_eos else text.token_ids)] for text in texts]
    read_at = [range(len(text.prompt_ids) - 1, len(whole)) for text, whole in zip(texts, wholes, strict=True)]
    width, n = max(map(len, wholes)), len(texts)
    padded = send(np.array([[*whole, *[whole[-1]] * (width - len(whole))] for whole in wholes]), model.device)
    # branches may go on behind a text that EOS ended early
    capacity = max(width, max(len(text.prompt_ids) for text in texts) + rules.max_new_tokens)
    cache = model.new_cache(capacity, n)
    block = model.block(cache, 0, width) if n == 1 else model.rows_block(cache, range(n), [0] * n, [width] * n)
    hidden = model.embed(padded, block)
    states = []
    for layer in range(model.n_layers):
        hidden = model.run_layers(hidden, layer, layer + 1, block)
        kept = torch.cat([hidden[i, span.start : span.stop] for i, span in enumerate(read_at)])
        states.append(kept.to(model.device))
    stacked = torch.stack(states, dim=1)
    packed = fetch(read_heads(model, stacked, rules))
    ends = np.cumsum([len(span) for span in read_at])
    taught = []
    for text, span, end in zip(texts, read_at, ends.tolist(), strict=True):
        columns, own = unpacked(packed[:, end - len(span) : end]), stacked[end - len(span) : end]
        anchor = -float(columns["top1"][0, -1])
        taught.append(TaughtText(text, anchor, {name: column[1:] for name, column in columns.items()}, own[1:]))
    if rules.warp.greedy:
        taught = [each.agreed() for each in taught]
    return _traces(model, rules, taught, cache, seed, branching)


def _wants_states(rules: Rules, branching: BranchRules | None) -> bool:
    """Whether branches have to draw from what layers said, and not only from their likeliest tokens."""
    return branching is not None and not rules.warp.greedy


def _traces(
    model: EarlyExitModel,
    rules: Rules,
    taught: list[TaughtText],
    cache: KVCache,
    seed: int,
    branching: BranchRules | None,
) -> list[PromptTrace]:
    """The records of texts that stand in the rows of a cache in this order."""
    branches: list[Arrays] = [{} for _ in taught]
    if branching is not None:
        branches = grow_branches(Lesson(model, rules, taught, cache), branching, seed)
    return [_trace(each, grown) for each, grown in zip(taught, branches, strict=True)]


def _trace(taught: TaughtText, branches: Arrays) -> PromptTrace:
    """The record of one text: anchor, decisions, and the closing position of a truncated text."""
    text, n = taught.text, taught.n_decided
    if text.ended_by_eos:
        n_layers = taught.columns["entropy"].shape[1]
        closing: Arrays = {name: np.zeros(n_layers, dtype=dtype) for name, dtype in CLOSING_DTYPES.items()}
    else:
        closing = {name: taught.columns[name.removeprefix("closing_")][n] for name in CLOSING_DTYPES}
    return PromptTrace(
        prompt_index=text.prompt_index,
        prompt_ids=np.array(text.prompt_ids),
        token_ids=np.array(text.token_ids),
        ended_by_eos=text.ended_by_eos,
        anchor=taught.anchor,
        **closing,
        **{name: column[:n] for name, column in taught.columns.items()},
        **branches,
    )
