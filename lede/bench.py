"""`lede bench`: every contender on every prompt, side by side, and one table of what came out.

All that is measured goes to files as it comes (`lede.bench_runs`), so the same command resumes a run that was stopped.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lede.bench_config import BenchConfig

if TYPE_CHECKING:
    from rich.console import Console

    from lede.bench_runs import Setup
    from lede.models import EarlyExitModel
    from lede.suites import Suite


def run_bench(config: BenchConfig, model: EarlyExitModel | None = None) -> dict[str, Any]:
    """Run a benchmark, or the rest of one, and print its tables; returns what report.json holds.

    Args:
        config: Settings.
        model: A model to use instead of loading `config.model`.

    Raises:
        ImportError: A package of the extra `bench` is not installed.
        ValueError: The model, a suite, a policy or the folder can't be used.
    """
    import torch
    from rich.console import Console

    from lede.bench_checks import check_before_loading, check_prompts
    from lede.bench_lineup import check_fit, contender_names
    from lede.bench_plots import write_plots
    from lede.bench_progress import Notes
    from lede.bench_report import terminal, write_report
    from lede.bench_setup import line_up, open_folder, price
    from lede.models import load_model

    _check_packages()
    texts = (*config.policy, *config.sweep)
    names = contender_names(texts)
    check_before_loading(config, list(names))
    console = Console()
    if config.threads is not None:
        torch.set_num_threads(config.threads)  # before compiling, which is for a number of threads
    if model is None:
        model = load_model(
            config.model, config.device, config.dtype, compile=config.compile, pack_weights=config.pack_weights
        )
    check_fit(model, list(names))
    suites = _load_suites(config, model)
    check_prompts(config, suites, list(names))
    setup = open_folder(config, model, suites)
    try:
        with Notes(console) as notes:
            for suite in suites:
                left_out = f", {suite.too_long} left out for their length" if suite.too_long else ""
                left_out += f", {suite.too_short} too short to go on from" if suite.too_short else ""
                notes.say(f"{suite.name}: {len(suite.test)} test, {len(suite.validation)} validation prompts{left_out}")
            setup = price(config, model, suites, setup, notes.tell)
            setup = line_up(config, model, suites, names, setup, notes.tell)
        for suite in suites:
            setup = _decode(config, model, suite, setup, console)
    except KeyboardInterrupt:
        console.print(
            f"stopped; {config.out} keeps what was measured, and the same command goes on from there", soft_wrap=True
        )
        raise
    report = write_report(config.out)
    plots = write_plots(config.out, report)
    console.print(terminal(report))
    files = ", ".join(["report.md", *(path.name for path in plots)])
    console.print(f"{config.out / 'report.json'}, {files}", soft_wrap=True, highlight=False)
    return report


def _check_packages() -> None:
    """Raise ImportError before anything is measured when the report could not be written in the end."""
    for package in ("rouge_score", "matplotlib"):
        if find_spec(package) is None:
            raise ImportError(f"a benchmark's report needs {package}: pip install 'lede-rl[bench]'", name=package)


def _decode(config: BenchConfig, model: EarlyExitModel, suite: Suite, setup: Setup, console: Console) -> Setup:
    """Decode what is missing of a suite, then tell how early its plain texts could have been foretold."""
    from lede.bench_decoding import SuiteRun
    from lede.bench_lineup import Decoding, entrant
    from lede.bench_log import RunLog
    from lede.bench_runs import write_setup
    from lede.layer_agreement import layer_agreement

    decoding = Decoding(config.max_new_tokens, config.temperature, config.seed)
    found = [entrant(model, each, decoding, config.out) for each in setup.contenders if each.suite == suite.name]
    with RunLog(config.out) as log:
        run = SuiteRun(model, suite, found, decoding, log)
        run.decode(config.repeats, console)
    at = [each.name for each in setup.suites].index(suite.name)
    if not setup.suites[at].agreement:
        try:
            agreement = layer_agreement(model, run.plain_texts()) or ()
        except RuntimeError as error:  # such as too little memory; the same command tries again
            console.print(f"{suite.name}: agreement by layer was not measured: {error}", highlight=False, markup=False)
            return setup
        changed = replace(setup.suites[at], agreement=agreement)
        setup = replace(setup, suites=(*setup.suites[:at], changed, *setup.suites[at + 1 :]))
        write_setup(config.out, setup)
    return setup


def _load_suites(config: BenchConfig, model: EarlyExitModel) -> list[Suite]:
    """The suites, with names of their own."""
    from lede.suites import load_suite

    room = model.max_positions - config.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the model's {model.max_positions} "
            "positions; lower it"
        )
    limit = min(room, config.max_prompt_tokens or room)
    suites = [
        load_suite(spec, model.tokenizer, config.chat, config.n_prompts, config.validation_prompts, limit, config.seed)
        for spec in config.suites
    ]
    names = [suite.name for suite in suites]
    return [suite if names.count(suite.name) == 1 else replace(suite, name=suite.spec) for suite in suites]
