"""A verification on the terminal: a line a prompt, then a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lede.verify_results import TOKENS_A_TIE, Difference, DtypeRun, Finding, Tally, VerifyReport

_COLUMNS = ("policy", "prompts", "tokens", "exact", "ties", "failures", "errors", "verdict")
_STYLES = {"exact": "green", "tie": "yellow", "failure": "bold red", "error": "bold red"}
_LEGEND = (
    "against transformers' generate and lede's plain decoding; ties: prompts whose text parts where the plain run's "
    "top-2 margin is within the dtype's noise; tokens: compared, up to the first difference"
)


def prompt_lines(dtype: str, findings: Sequence[Finding]) -> Iterator[Text]:
    """What was found on one prompt: one line when all texts are equal, else one for each that is not.

    Args:
        dtype: Dtype of the weights.
        findings: Of the prompt, one for each policy.
    """
    where = f"{dtype}, prompt {findings[0].prompt}"
    apart = [each for each in findings if each.verdict != "exact"]
    if not apart:
        yield Text.assemble(f"{where}: ", ("exact", _STYLES["exact"]))
    for each in apart:
        yield Text.assemble(f"{where}, {each.policy}: ", (_said(each), _STYLES[each.verdict]))


def report(found: VerifyReport) -> Group:
    """Counts for each policy in each dtype, and what they mean."""
    where = Text(f"\n{found.model} on {found.device} ({found.device_name})")
    return Group(where, *map(_table, found.runs), Text(_LEGEND, style="dim"), *_notes(found))


def _table(run: DtypeRun) -> Table:
    title = Text(f"{run.dtype}, noise {run.noise:.0e} of the largest logit")
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for column in _COLUMNS:  # long names of policies wrap, figures never do
        named = column in ("policy", "verdict")
        shown.add_column(column, justify="left" if named else "right", no_wrap=column != "policy", overflow="fold")
    for tally in run.tallies:
        shown.add_row(*_row(tally), style=None if tally.passed else "red")
    return shown


def _row(tally: Tally) -> list[Text]:
    counts = (tally.prompts, tally.tokens, tally.exact, tally.ties, tally.failures, tally.errors)
    return [Text(tally.policy), *(Text(str(count)) for count in counts), Text(tally.verdict)]


def _notes(found: VerifyReport) -> Iterator[Text]:
    asked, had = found.config["n_prompts"], max(tally.prompts for tally in found.tallies)
    if asked is not None and asked > had:
        yield Text(f"{asked} prompts were asked for; the file has {had}", style="yellow")
    for tally in found.tallies:
        if tally.too_many_ties:
            yield Text(
                f"{tally.policy}: {tally.ties} ties in {tally.tokens} tokens of float32, where they must be rarer than "
                f"one in {TOKENS_A_TIE}",
                style="red",
            )


def _said(finding: Finding) -> str:
    if finding.error is not None:
        return f"error: {finding.error}"
    return "; ".join(_apart(each) for each in finding.differences)


def _apart(each: Difference) -> str:
    kind = "numerical tie" if each.tie else "FAILURE"
    tokens = (_token(each.found, each.found_text), _token(each.wanted, each.wanted_text))
    return (
        f"{kind} at token {each.position}, margin {each.margin:.1e} (noise {each.noise:.0e}): {tokens[0]} where "
        f"{each.reference} has {tokens[1]}"
    )


def _token(token: int | None, text: str | None) -> str:
    if token is None:
        return "the end"
    return f"{token}" if text is None else f"{text!r}"
