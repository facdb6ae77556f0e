"""`lede deploy`: decode prompts under a policy, on the terminal or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lede.prompts import Chat, check_lengths, encode_prompts, load_prompts
from lede.round_sources import count_sources, round_shares, token_shares

if TYPE_CHECKING:
    from lede.generation import GenerateOutput
    from lede.models import EarlyExitModel
    from lede.policies import Policy
    from lede.statistics import DecodingStats


@dataclass(frozen=True)
class DeployConfig:
    """Settings of a deployment; exactly one of `prompt` and `prompts` is needed."""

    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    policy: str = "plain"
    """Policy: a folder, NAME, or NAME:key=value;key=value; plain decodes without one."""
    prompt: str | None = None
    """Text to continue."""
    prompts: Path | None = None
    """Prompts, .jsonl or .txt."""
    max_new_tokens: int = 128
    """Budget of new tokens a prompt."""
    temperature: float = 0.0
    """0 decodes greedily; above 0 samples."""
    top_k: int | None = None
    """Sample among the k likeliest tokens."""
    top_p: float | None = None
    """Sample among the likeliest tokens that reach this probability."""
    min_p: float | None = None
    """Sample among tokens at least this likely next to the likeliest one."""
    repetition_penalty: float | None = None
    """Above 1, make tokens that stand in the prompt or the text less likely."""
    no_repeat_ngram_size: int | None = None
    """Let no sequence of this many tokens occur twice."""
    stop_strings: tuple[str, ...] = ()
    """End a text after the token that completes one of these."""
    max_time: float | None = None
    """Seconds after which a text ends."""
    seed: int = 0
    """Seed of the tokens drawn; each prompt draws from a stream of its own."""
    chat: Chat = "auto"
    """Whether prompts go through the chat template; `auto` is on for prompts from `turns`."""
    device: str | None = None
    """Device, such as cuda; the CPU unless given."""
    dtype: str | None = None
    """Dtype of the weights, such as bfloat16; float32 on the CPU unless given."""
    compile: bool = False
    """Compile the layers, plain decoding's too; it takes seconds before the first token."""
    pack_weights: bool = False
    """Pack the weights, for plain decoding too: float32 or bfloat16 on the CPU, for as much memory again."""
    json: bool = False
    """Print one JSON object with `results` and `summary`, and nothing else."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give either --prompt TEXT or --prompts FILE")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `generate` among them, but for each prompt's stream."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop_strings", "max_time")
        more = ("min_p", "repetition_penalty", "no_repeat_ngram_size")
        given = {name: getattr(self, name) for name in more if getattr(self, name) is not None}
        return {**{name: getattr(self, name) for name in names}, **given}


def deploy(config: DeployConfig, model: EarlyExitModel | None = None) -> dict[str, Any]:
    """Decode the prompts, print texts and a summary, and return what `--json` prints.

    Args:
        config: Settings.
        model: A model to use instead of loading `config.model`.

    Raises:
        ValueError: A prompt, the model or the policy can't be used; before anything is decoded.
    """
    from lede.checkpoint import check_fingerprint
    from lede.generation import generate
    from lede.generation_settings import resolve
    from lede.models import load_model
    from lede.policies import parse_policy

    resolve(None, config.settings)  # complains before a model is loaded
    policy = parse_policy(config.policy)
    texts = [config.prompt] if config.prompt is not None else load_prompts(config.prompts or Path())
    if model is None:
        model = load_model(
            config.model, config.device, config.dtype, compile=config.compile, pack_weights=config.pack_weights
        )
    ids = encode_prompts(model.tokenizer, texts, config.chat)
    check_lengths(ids, config.max_new_tokens, model.max_positions)
    if policy is not None:
        check_fingerprint(policy, model)
        policy.check_model(model)
    outputs = []
    for number, prompt in enumerate(ids):
        streamer = None
        if not config.json:
            if len(ids) > 1:
                print(f"--- prompt {number + 1} of {len(ids)}")
            streamer = _streamer(model)
        outputs.append(
            generate(
                model,
                input_ids=prompt,
                policy=policy,
                streamer=streamer,
                **config.settings,
                stream=number,
            )
        )
    report = _report(config, model, policy, ids, outputs)
    if config.json:
        print(json.dumps(report))
    else:
        _print_summary(report["summary"])
    return report


def _streamer(model: EarlyExitModel) -> Any:
    """Writes tokens to the terminal as they are committed, prompt included."""
    from transformers import TextStreamer

    return TextStreamer(model.tokenizer, skip_special_tokens=True)


def pooled(outputs: Sequence[GenerateOutput], n_layers: int) -> DecodingStats:
    """Statistics over all sequences: counts and seconds are summed, rates are taken of the sums."""
    from lede.statistics import Seconds, summarize

    spent = [asdict(out.stats.seconds) for out in outputs]
    seconds = Seconds(**{section: sum(s[section] for s in spent) for section in spent[0]})
    rounds = [r for out in outputs for r in out.rounds]
    return summarize(rounds, seconds, sum(out.stats.head_reads for out in outputs), len(outputs), n_layers)


def by_source(outputs: Sequence[GenerateOutput]) -> dict[str, dict[str, Any]]:
    """Rounds and their tokens by where the draft came from, over all sequences, with their shares and acceptance."""
    found = count_sources((r.source, r.drafted, r.accepted, len(r.tokens)) for out in outputs for r in out.rounds)
    of_rounds, of_tokens = round_shares(found), token_shares(found)
    return {
        source: {
            **asdict(counts),
            "round_share": of_rounds[source],
            "token_share": of_tokens.get(source, 0.0),
            "acceptance_rate": counts.acceptance_rate,
        }
        for source, counts in found.items()
    }


def _report(
    config: DeployConfig,
    model: EarlyExitModel,
    policy: Policy | None,
    ids: Sequence[Sequence[int]],
    outputs: Sequence[GenerateOutput],
) -> dict[str, Any]:
    results = [
        {
            "prompt_tokens": len(prompt),
            "text": out.text,
            "token_ids": out.sequences[0, len(prompt) :].tolist(),
            "finish_reason": out.finish_reason,
            "stats": out.stats.to_dict(),
            "sources": by_source([out]),
        }
        for prompt, out in zip(ids, outputs, strict=True)
    ]
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(config).items()}
    summary = {
        "model": model.name,
        "policy": "plain" if policy is None else policy.kind,
        "n_prompts": len(outputs),
        **pooled(outputs, model.n_layers).to_dict(),
        "sources": by_source(outputs),
        "config": settings,
    }
    return {"results": results, "summary": summary}


def _print_summary(summary: dict[str, Any]) -> None:
    def show(name: str, digits: int = 2) -> str:
        value = summary[name]
        return "-" if value is None else f"{value:.{digits}f}"

    print(
        f"[{summary['policy']}] {summary['tokens']} tokens of {summary['n_prompts']} prompt(s), "
        f"{show('tokens_per_second', 1)} tokens/s, acceptance {show('acceptance_rate')}, "
        f"accepted a round {show('mean_accepted_length')}, drafted {show('mean_draft_length')}, "
        f"exit layer {show('mean_exit_layer')}, skipped share {show('mean_skipped_share')}{_sources(summary)}",
        file=sys.stderr,
    )


def _sources(summary: dict[str, Any]) -> str:
    """Shares of rounds and tokens by source, where anything was drafted."""
    found = summary["sources"]
    if set(found) <= {"plain"}:
        return ""
    shares = [
        f"{name} {100 * each['round_share']:.0f} % of rounds, {100 * each['token_share']:.0f} % of tokens"
        for name, each in found.items()
    ]
    return f"; {'; '.join(shares)}"
