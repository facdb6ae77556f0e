"""What the index of lookups costs, against the decoding steps that it goes with.

python -m benchmarks.lookup_index --model demo --contexts 2048,32768 --out index.json

The text is the Python library's own, by the model's tokenizer. A step is one token through all layers and the head
behind a cache of that length, whose content is random: what is timed does not depend on it, nor on whether the model
was made for so many positions. The share is that of a token's index entry, its search and a proposal of 16 tokens, as
where every round looks up and nothing is accepted; in a round whose 16 tokens are all accepted 17 are indexed. The
index is timed right behind steps, which leave the processor's caches as decoding does.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import tyro

from lede.cache import KVCache
from lede.lookup import LookupConfig, LookupIndex
from lede.models import EarlyExitModel, load_model

PROPOSED = 16
"""Tokens of a proposal."""
BLOCK = 512
"""Tokens of the prefill that is timed."""


@dataclass(frozen=True)
class IndexSettings:
    """Settings."""

    out: Path
    """File of the figures as JSON; replaced whole."""
    model: str = "demo"
    """Model: demo, a folder, a hub id, or a .gguf file."""
    contexts: str = "2048,32768"
    """Tokens of the text, comma-separated."""
    max_suffix: int = 3
    """Longest end of the text that is searched for."""
    repeats: int = 15
    """Steps, and tokens indexed one by one, that are timed at each context."""


@dataclass(frozen=True)
class IndexCost:
    """Figures at one context length; seconds are medians."""

    context: int
    """Tokens of the text."""
    build: float
    """Seconds of indexing it from nothing."""
    index: float
    """Seconds of indexing one more token and searching for the new end of the text."""
    propose: float
    """Seconds of copying 16 tokens."""
    step: float
    """Seconds of one token through the model."""
    block: float
    """Seconds of 17 tokens through the model at once."""
    prefill: float
    """Seconds a token of a prefill, of its first tokens, which are the cheapest."""
    megabytes: float
    """Memory of the index."""

    @property
    def share(self) -> float:
        """Of a decoding step, where every round looks up and nothing is accepted."""
        return (self.index + self.propose) / (self.step + self.index + self.propose)

    @property
    def share_of_block(self) -> float:
        """Of a round whose 16 tokens are all accepted."""
        spent = (PROPOSED + 1) * self.index + self.propose
        return spent / (self.block + spent)

    @property
    def share_of_prefill(self) -> float:
        """Of sending the prompt through the model and the index."""
        spent = self.build / self.context
        return spent / (self.prefill + spent)


def library_tokens(tokenizer: Any) -> Iterator[int]:
    """The modules of the Python library, in order of their names, as one text."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield from tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]


def index_seconds(
    text: list[int], context: int, config: LookupConfig, before: Callable[[], object]
) -> tuple[float, float, float, float]:
    """Seconds of building, of a further token and of a proposal, and megabytes.

    Args:
        text: Goes on behind the context; what follows is indexed one by one.
        context: Tokens of the text.
        config: How it is searched.
        before: Run before each further token, untimed.
    """
    tracemalloc.start()
    sized = LookupIndex(config, text[:context])
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del sized
    started = time.perf_counter()
    index = LookupIndex(config, text[:context])
    built = time.perf_counter() - started
    further, proposals = [], []
    for token in text[context:]:
        before()
        started = time.perf_counter()
        index.extend((token,))
        index.match()
        between = time.perf_counter()
        index.propose(PROPOSED)
        further.append(between - started)
        proposals.append(time.perf_counter() - between)
    return built, statistics.median(further), statistics.median(proposals), size / 1e6


def passes(model: EarlyExitModel, cache: KVCache, start: int, q: int) -> Callable[[], None]:
    """A pass of `q` tokens behind `start` others, again and again."""
    ids = torch.arange(q, device=model.device)[None] % model.vocab_size

    @torch.inference_mode()
    def once() -> None:
        block = model.block(cache, start, q)
        hidden = model.run_layers(model.embed(ids, block), 0, model.n_layers, block)
        model.head(hidden)[0].argmax(-1).tolist()  # waits for the device
        cache.rewind(start)

    return once


def measured(model: EarlyExitModel, text: list[int], context: int, config: LookupConfig, repeats: int) -> IndexCost:
    """Everything at one context length."""
    cache = _filled(model, context)
    one, several = passes(model, cache, context, 1), passes(model, cache, context, PROPOSED + 1)
    prefill = passes(model, model.new_cache(BLOCK), 0, BLOCK)
    built, index, propose, size = index_seconds(text[: context + repeats], context, config, one)
    return IndexCost(
        context=context,
        build=built,
        index=index,
        propose=propose,
        step=_median(one, repeats),
        block=_median(several, repeats),
        prefill=_median(prefill, min(repeats, 5)) / BLOCK,
        megabytes=size,
    )


@torch.inference_mode()
def _filled(model: EarlyExitModel, context: int) -> KVCache:
    """A cache of random keys and values."""
    cache = model.new_cache(context + PROPOSED + 1)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    block = model.block(cache, 0, 1)
    model.run_layers(model.embed(ids, block), 0, model.n_layers, block)  # makes the buffers
    for buffer in (*cache.keys, *cache.values):
        assert buffer is not None
        buffer.normal_()
    cache.lengths = [context] * model.n_layers
    return cache


def with_room(model: EarlyExitModel, positions: int) -> EarlyExitModel:
    """The model, made to take longer texts than it was made for where it must.

    Raises:
        ValueError: Its positions are weights, of which there are no more.
    """
    if positions <= model.max_positions:
        return model
    config: Any = model.config
    if getattr(config, "rope_parameters", None) is None:
        raise ValueError(f"this model has room for {model.max_positions} tokens and no more; lower --contexts")
    config.max_position_embeddings = positions
    return load_model((model.hf_model, model.tokenizer))


def _median(run: Callable[[], None], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(settings: IndexSettings) -> list[IndexCost]:
    """Measure, print a table and write."""
    contexts = [int(part) for part in settings.contexts.split(",")]
    model = with_room(load_model(settings.model), max(contexts) + PROPOSED + 1)
    config = LookupConfig(max_suffix=settings.max_suffix)
    text = list(islice(library_tokens(model.tokenizer), max(contexts) + settings.repeats))
    found = [measured(model, text, context, config, settings.repeats) for context in contexts]
    print("| context | a token, us | a proposal, us | step, ms | share of a step | of a full round | of prefill | MB |")
    print("|---|---|---|---|---|---|---|---|")
    for c in found:
        print(
            f"| {c.context} | {1e6 * c.index:.1f} | {1e6 * c.propose:.1f} | {1e3 * c.step:.2f} | {100 * c.share:.3f} % "
            f"| {100 * c.share_of_block:.3f} % | {100 * c.share_of_prefill:.2f} % | {c.megabytes:.0f} |"
        )
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    shares = ("share", "share_of_block", "share_of_prefill")
    content = [{**asdict(c), **{name: getattr(c, name) for name in shares}} for c in found]
    settings.out.write_text(json.dumps(content, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main(tyro.cli(IndexSettings, description=__doc__))
