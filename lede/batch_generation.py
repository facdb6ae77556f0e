"""`generate` for a batch: which policies can decide for many texts, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

from lede.batch_decoding import BatchDecoder
from lede.batch_row import BatchRow
from lede.models import EarlyExitModel
from lede.output import GenerateOutput
from lede.policies.base import Policy
from lede.policies.online import learns_online
from lede.policies.random import RandomConfig
from lede.request import Request
from lede.statistics import DecodingStats, Meter, summarize


def generate_batch(
    model: EarlyExitModel, rows: Sequence[Sequence[int]], policy: Policy | None, request: Request
) -> list[GenerateOutput]:
    """Decode several texts in lockstep; each is what it would be alone.

    One forward pass a step takes every row along that needs it. Rows keep decisions, luck, budget and history of their
    own, and drop out when they are done.

    The clock is shared: the `seconds` of every output are those of the whole batch, so that a row's `tokens_per_second`
    is what it got out of the call, and the sum over the rows is the batch's; `batch_stats` pools them.

    Args:
        model: The model.
        rows: Token ids of each prompt, without padding.
        policy: Who decides for all rows, checked against the model; None decodes plainly.
        request: Budgets, luck, ends and what to keep of each row.

    Raises:
        ValueError: The policy can't decide for more than one text.
    """
    if len(rows) == 1:
        from lede.generation import decode_rows

        return decode_rows(model, request, policy)
    if policy is not None:
        check_batch_policy(policy)
    texts = []
    for number, prompt in enumerate(rows):
        chooser = request.chooser(number, model.device)
        stopping = request.stopping(number, chooser, model.device)
        texts.append(BatchRow(number, prompt, request.budgets[number], chooser, request.eos, stopping))
    meter = Meter()
    for _ in BatchDecoder(model, policy, texts, meter).decode():
        pass
    seconds = meter.stats().seconds
    outputs = []
    for row in texts:
        stats = summarize(row.rounds, seconds, row.head_reads, n_layers=model.n_layers)
        outputs.append(request.output(model, row.number, row.new, row.chooser, stats, row.rounds, row.stopped))
    return outputs


def batch_stats(outputs: Sequence[GenerateOutput]) -> DecodingStats:
    """Statistics of a whole batch from the outputs of its rows, whose seconds are all the batch's.

    Raises:
        ValueError: There are no outputs, or they are not of one batch.
    """
    if not outputs:
        raise ValueError("a batch has at least one output, got none")
    seconds = outputs[0].stats.seconds
    if any(output.stats.seconds != seconds for output in outputs):
        raise ValueError("the outputs are of several calls; give those of one batch")
    rounds = [r for output in outputs for r in output.rounds]
    return summarize(rounds, seconds, sum(output.stats.head_reads for output in outputs), len(outputs))


def check_batch_policy(policy: Policy) -> None:
    """Raise ValueError when a policy can't decide for several texts in lockstep: it learns from one, or leaves gaps."""
    if learns_online(policy):
        raise ValueError(
            f"the {policy.kind} policy learns from the text that it decodes, so it can't decide for a batch of "
            "several; decode the prompts one by one"
        )
    if isinstance(policy.config, RandomConfig) and policy.config.gap_probability > 0:
        raise ValueError(
            f"the {policy.kind} policy drafts with gaps (gap_probability {policy.config.gap_probability}), which a "
            "batch of several can't; set it to 0 or decode the prompts one by one"
        )
