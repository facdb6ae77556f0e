"""One prompt of a verification: decoded by everybody, and compared with transformers and the engine's plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lede import generation, rivals
from lede.bench_runs import PLAIN, TRANSFORMERS
from lede.exactness import NOISE, compare
from lede.verify_results import Difference, Finding

if TYPE_CHECKING:
    from lede.models import EarlyExitModel
    from lede.policies import Policy


def findings_of(
    model: EarlyExitModel, policies: dict[str, Policy | None], number: int, ids: Sequence[int], max_new_tokens: int
) -> Iterator[Finding]:
    """Decode one prompt with the engine without a policy, then under each policy, and compare.

    Args:
        model: The model.
        policies: Policies by what to call them; None is plain decoding, which comes first in any case.
        number: Number of the prompt.
        ids: Its token ids.
        max_new_tokens: Budget of new tokens.

    Yields:
        A finding for each; an exception becomes its error, after which the policy forgets what it learned.
    """
    contenders = {PLAIN: None, **policies}
    wanted: dict[str, list[int]] = {}
    try:
        wanted[TRANSFORMERS] = rivals.plain_text(model, ids, max_new_tokens)
    except Exception as error:  # whatever it is, other prompts may do
        told = f"transformers' generate: {_message(error)}"
        yield from (Finding(number, len(ids), name, 0, error=told) for name in contenders)
        return
    for name, policy in contenders.items():
        try:
            out = generation.generate(model, input_ids=list(ids), policy=policy, max_new_tokens=max_new_tokens)
            found = out.sequences[0, len(ids) :].tolist()
            yield _compared(model, number, ids, name, found, wanted)
        except Exception as error:  # the policy's own, or of its text: others go on
            yield Finding(number, len(ids), name, 0, error=_message(error))
            if policy is not None:
                policy.reset()
        else:
            if name == PLAIN and found != wanted[TRANSFORMERS]:
                wanted[PLAIN] = found


def _compared(
    model: EarlyExitModel,
    number: int,
    ids: Sequence[int],
    name: str,
    found: Sequence[int],
    wanted: dict[str, list[int]],
) -> Finding:
    """A text against every reference there is."""
    differences = []
    for reference, text in wanted.items():
        apart = compare(model, ids, found, text)
        if apart is None:
            continue
        ours, theirs = (each[apart.position] if apart.position < len(each) else None for each in (found, text))
        differences.append(
            Difference(
                reference=reference,
                position=apart.position,
                margin=apart.margin,
                noise=NOISE[model.dtype],
                tie=apart.tie,
                found=ours,
                wanted=theirs,
                found_text=_shown(model, ours),
                wanted_text=_shown(model, theirs),
            )
        )
    n_compared = min([len(found), *(each.position + 1 for each in differences)])
    return Finding(number, len(ids), name, n_compared, tuple(differences))


def _shown(model: EarlyExitModel, token: int | None) -> str | None:
    return None if token is None or model.tokenizer is None else str(model.tokenizer.decode([token]))


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
