"""The teacher: writes each text once, then reads every layer at every token in one teacher-forced pass.

From a share of the wrong drafts that this shows, it rolls the drafter on (see `lede.collectors.branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from lede.buffers.records import CLOSING_DTYPES, PromptTrace
from lede.collectors.branch_walk import Arrays
from lede.collectors.branches import BranchRules, Lesson, grow_branches
from lede.collectors.rollout import NumberedPrompt
from lede.envs import LayerWalk, Row, Rules
from lede.features import primitives
from lede.models import EarlyExitModel

LOGITS_AT_ONCE = 2**24
"""Most logits that a chunk of head reads holds; 64 MiB in float32."""

Columns = dict[str, torch.Tensor]


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
        batch = prompts[start : start + batch_size]
        yield from read_traces(model, _generate(model, batch, rules, seed, on_tokens), rules, seed, branching)


@torch.no_grad()
def read_traces(
    model: EarlyExitModel, rows: Sequence[Row], rules: Rules, seed: int = 0, branching: BranchRules | None = None
) -> list[PromptTrace]:
    """Full information about finished texts from one pass over all of them, and branches from some of their errors.

    A row's states are read at its last prompt position (the anchor), at the positions of its decisions, and, where the
    budget ended it, at its last token.

    Args:
        model: The model.
        rows: The texts.
        rules: As in `collect_teacher`.
        seed: Of the branches.
        branching: Which wrong drafts get a branch; None for no branches.
    """
    texts = [[*row.prompt_ids, *(row.token_ids[:-1] if row.ended_by_eos else row.token_ids)] for row in rows]
    read_at = [range(len(row.prompt_ids) - 1, len(text)) for row, text in zip(rows, texts, strict=True)]
    width = max(map(len, texts))
    padded = torch.tensor([[*text, *[text[-1]] * (width - len(text))] for text in texts], device=model.device)
    # branches may go on behind a text that EOS ended early
    capacity = max(width, max(len(row.prompt_ids) for row in rows) + rules.max_new_tokens)
    cache = model.new_cache(capacity, len(rows))
    if len(rows) == 1:
        block = model.block(cache, 0, width)
    else:
        positions = torch.arange(width, device=model.device).expand(len(rows), width)
        block = model.ragged_block(cache, positions, torch.arange(len(rows), device=model.device))
    hidden = model.embed(padded, block)
    states = []
    for layer in range(model.n_layers):
        hidden = model.run_layers(hidden, layer, layer + 1, block)
        kept = torch.cat([hidden[i, span.start : span.stop] for i, span in enumerate(read_at)])
        states.append(kept.to(model.device))
    # the target's choice at each position; what follows the last token of a truncated text is not known
    targets = [token for row in rows for token in (row.token_ids if row.ended_by_eos else [*row.token_ids, -1])]
    stacked = torch.stack(states, dim=1)
    columns = _read(model, stacked, torch.tensor(targets, device=model.device), rules)
    parts = {name: torch.split(column, [len(span) for span in read_at]) for name, column in columns.items()}
    branches: list[Arrays] = [{} for _ in rows]
    if branching is not None:
        first = np.cumsum([0, *(len(span) for span in read_at[:-1])]) + 1
        token, match = columns["token"].numpy(), columns["match"].numpy()
        lesson = Lesson(model, rules, rows, cache, stacked, token, match, first.tolist())
        branches = grow_branches(lesson, branching, seed)
    return [_trace(row, {name: column[i] for name, column in parts.items()}, branches[i]) for i, row in enumerate(rows)]


def _generate(
    model: EarlyExitModel,
    batch: Sequence[NumberedPrompt],
    rules: Rules,
    seed: int,
    on_tokens: Callable[[int], None] | None,
) -> list[Row]:
    walk = LayerWalk(model, rules, len(batch), max(len(ids) for _, ids in batch) + rules.max_new_tokens, seed)
    walk.prefill(dict(enumerate(batch)))
    written = len(batch)
    while True:
        if on_tokens is not None:
            on_tokens(written)
        going_on = [r for r in range(len(batch)) if not walk.row(r).done]
        if not going_on:
            return [walk.row(r) for r in range(len(batch))]
        walk.skip(going_on)
        written = len(going_on)


def _read(model: EarlyExitModel, states: torch.Tensor, targets: torch.Tensor, rules: Rules) -> Columns:
    """Columns `(position, layer)` of states `(position, layer, width)`, a chunk of positions at a time."""
    step = max(1, LOGITS_AT_ONCE // (model.n_layers * model.vocab_size))
    chunks: list[Columns] = []
    for part, target in zip(torch.split(states, step), torch.split(targets, step), strict=True):
        logits = model.head(part)  # (position, layer, vocabulary)
        read = primitives(logits, rules.features.top_k)
        if rules.warp.greedy:
            match = (read.token == target[:, None]).float()
            match[:, -1] = 1.0  # the text is the last layer's, whatever rounding says in this pass
        else:
            q = rules.warp.probabilities(logits)
            match = torch.minimum(q, q[:, -1:]).sum(-1).clamp(max=1.0)
        chunks.append(
            {
                "confidence": read.confidence,
                "entropy": read.entropy,
                "top1": read.top1,
                "top2": read.top2,
                "token": read.token,
                "match": match,
            }
        )
    return {name: torch.cat([chunk[name] for chunk in chunks]).cpu() for name in chunks[0]}


def _trace(row: Row, columns: Columns, branches: Arrays) -> PromptTrace:
    """The record of one text from its columns: anchor, decisions, and the closing position of a truncated text."""
    end = len(row.token_ids)
    decided = {name: column[1:end].numpy() for name, column in columns.items()}
    n_layers = columns["entropy"].shape[1]
    closing: Arrays = {name: np.zeros(n_layers, dtype=dtype) for name, dtype in CLOSING_DTYPES.items()}
    if not row.ended_by_eos:
        closing = {name: columns[name.removeprefix("closing_")][end].numpy() for name in CLOSING_DTYPES}
    return PromptTrace(
        prompt_index=row.prompt_index,
        prompt_ids=np.array(row.prompt_ids),
        token_ids=np.array(row.token_ids),
        ended_by_eos=row.ended_by_eos,
        anchor=-float(columns["top1"][0, -1]),
        **closing,
        **decided,
        **branches,
    )
