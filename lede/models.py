"""Any span of layers of a transformers decoder: embed, layers [a, b), norm and head.

Everything here works on the modules of the transformers model itself, so logits after all layers are bit-equal to the
model's own. What is supported stands in `lede.families`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging

from lede.cache import KVCache
from lede.families import FAMILIES, Family, UnsupportedModelError, check_supported
from lede.sublayers import Record, Sublayers

if TYPE_CHECKING:
    from lede.policies.base import SkipSublayers

__all__ = [
    "DEMO_FOLDER",
    "FAMILIES",
    "Block",
    "EarlyExitModel",
    "Family",
    "UnsupportedModelError",
    "check_supported",
    "load_model",
]

DEMO_FOLDER = Path(__file__).parent / "demo" / "model"


_CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past", "past_key_value")


@dataclass
class Block:
    """Where a block of tokens sits: its positions, rotary tables and masks, shared by every span it goes through."""

    positions: torch.Tensor
    """Positions of the tokens, `(1 or row, token)`."""
    cache: KVCache
    """The cache that the layers read and extend."""
    start: int | None
    """Position of the first token when all rows are aligned; None for ragged rows."""
    rows: torch.Tensor | None
    """The rows of the cache that take part, `(row,)`; None for all."""
    extent: int
    """Slots visible to attention in a ragged block."""
    rotary: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Rotary tables by layer type."""
    masks: dict[int | None, torch.Tensor | None]
    """Attention masks by sliding window."""


class EarlyExitModel:
    """A transformers causal LM that can be run span by span and read at any layer.

    Args:
        hf_model: The causal LM; taken as it is, neither cast nor moved.
        tokenizer: Its tokenizer, or None when only token ids are used.
        name: What to call it in reports; its path, hub id or class.
    """

    def __init__(self, hf_model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        self.config = hf_model.config
        self.family = check_supported(self.config)
        if hf_model.training and _trains_otherwise(hf_model):
            raise ValueError(
                "the model is in training mode and has dropout or gradient checkpointing; call model.eval() first"
            )
        if hf_model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{type(hf_model).__name__} has no LM head; load it as a causal language model")
        _ = self.attention
        self.hf_model = hf_model
        self.tokenizer = tokenizer
        self.name = name or type(hf_model).__name__
        stack = getattr(hf_model, self.family.decoder)
        self._embed: nn.Module = hf_model.get_input_embeddings()
        self._positions: nn.Module | None = getattr(stack, self.family.positions) if self.family.positions else None
        self._rotary: nn.Module | None = getattr(stack, self.family.rotary) if self.family.rotary else None
        self._layers: list[nn.Module] = list(getattr(stack, self.family.layers))
        self._steps = list(enumerate(self._layers))
        self._sublayers = Sublayers(self.family, self._layers)
        self._norm: nn.Module = getattr(stack, self.family.norm)
        self._head: nn.Module = hf_model.get_output_embeddings()
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.n_layers = len(self._layers)
        types = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        self.layer_types = list(types) if types else [_default_type(self.family, window)] * self.n_layers
        self.windows = [window if t == "sliding_attention" else None for t in self.layer_types]
        arguments = inspect.signature(self._layers[0].forward).parameters
        self._cache_argument = next(a for a in _CACHE_ARGUMENTS if a in arguments)

    def __repr__(self) -> str:
        kind = self.config.model_type
        return f"EarlyExitModel({self.name}: {kind}, {self.n_layers} layers, {self.dtype}, {self.device})"

    @property
    def attention(self) -> str:
        """The attention that transformers runs, "sdpa" or "eager"; it can be switched on the transformers model.

        Raises:
            UnsupportedModelError: It is another one.
        """
        name = str(getattr(self.config, "_attn_implementation", None) or "eager")
        if name not in ("sdpa", "eager"):
            raise UnsupportedModelError(f"attention '{name}' is not supported; load with 'sdpa' or 'eager'")
        return name

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return next(self._embed.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return next(self._embed.parameters()).dtype

    @property
    def max_positions(self) -> int:
        """Positions that the model was configured for, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the model's generation config; empty when it has none."""
        eos = getattr(getattr(self.hf_model, "generation_config", None), "eos_token_id", None)
        if eos is None:
            return ()
        return tuple(int(i) for i in eos) if isinstance(eos, (list, tuple)) else (int(eos),)

    def check_exit_layer(self, layer: int) -> None:
        """Raise ValueError unless a draft can leave after `layer` layers."""
        if not 1 <= layer <= self.n_layers - 1:
            raise ValueError(f"exit layer {layer} is outside 1..{self.n_layers - 1} of a model with {self.n_layers}")

    def new_cache(self, capacity: int, batch_size: int = 1) -> KVCache:
        """An empty cache for this model; capacity in tokens."""
        return KVCache(self.n_layers, capacity, batch_size, self.windows)

    def block(self, cache: KVCache, start: int, n_tokens: int) -> Block:
        """Place `n_tokens` tokens at positions `start, start + 1, ...` of every row of the cache."""
        cache.place(start)
        positions = torch.arange(start, start + n_tokens, device=self.device)[None]
        return Block(positions, cache, start, None, start + n_tokens, {}, {})

    def ragged_block(self, cache: KVCache, positions: torch.Tensor, rows: torch.Tensor) -> Block:
        """Place tokens at `positions` `(row, token)` of the given rows `(row,)` of the cache.

        Rows shorter than the block are padded on the right by tokens at later positions: a query never looks past its
        own position, and the slots are overwritten when the row gets there.
        """
        extent = int(positions.max()) + 1
        if extent > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens, {extent} were needed")
        return Block(positions, cache, None, rows, extent, {}, {})

    def embed(self, token_ids: torch.Tensor, block: Block) -> torch.Tensor:
        """Hidden states before the first layer, `(row, token, width)`, of ids `(row, token)`."""
        hidden: torch.Tensor = self._embed(token_ids)
        return hidden if self._positions is None else hidden + self._positions(block.positions)

    def run_layers(self, hidden: torch.Tensor, first: int, last: int, block: Block) -> torch.Tensor:
        """Hidden states after `last` layers of states after `first` layers, `(row, token, width)`.

        Layers first+1..last run once over the block's tokens and extend the cache.
        """
        return self._run(hidden, self._steps[first:last], block)

    def run_skipping(self, hidden: torch.Tensor, plan: SkipSublayers, block: Block) -> torch.Tensor:
        """Hidden states of a draft with gaps, `(row, token, width)`, of states after the layers before the first gap.

        The layers from the first gap to the last run once without the sublayers that the plan leaves out. Those whose
        attention is left out don't extend the cache.

        Raises:
            ValueError: The plan doesn't fit the model.
            UnsupportedModelError: The layers can't be run in part.
        """
        return self._run(hidden, self._sublayers.skipping(plan), block)

    def run_recording(self, hidden: torch.Tensor, block: Block, record: Record) -> torch.Tensor:
        """Hidden states after all layers, `(row, token, width)`; `record` sees what each sublayer adds to them.

        Raises:
            UnsupportedModelError: The layers can't be run in part.
        """
        return self._run(hidden, self._sublayers.recording(record), block)

    def check_sublayers(self) -> None:
        """Raise UnsupportedModelError when `run_skipping` and `run_recording` can't run this model's layers."""
        self._sublayers.check()

    def _run(self, hidden: torch.Tensor, steps: Iterable[tuple[int, nn.Module]], block: Block) -> torch.Tensor:
        """States after these layers, each given with its place in the stack."""
        if block.start is not None:
            block.cache.place(block.start)
        elif block.rows is not None:
            block.cache.place_ragged(block.positions, block.rows, block.extent)
        for i, layer in steps:
            arguments: dict[str, Any] = {
                "attention_mask": self._mask(block, i, hidden),
                "position_ids": block.positions,
                "use_cache": True,
                self._cache_argument: block.cache,
            }
            if self._rotary is not None:
                arguments["position_embeddings"] = self._rotary_table(block, self.layer_types[i], hidden)
            out = layer(hidden, **arguments)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """A head read: logits `(row, token, vocabulary)` of hidden states through the final norm and the LM head."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _rotary_table(self, block: Block, layer_type: str, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = layer_type if self.family.rotary_by_type else ""
        if key not in block.rotary:
            assert self._rotary is not None
            extra = (layer_type,) if self.family.rotary_by_type else ()
            block.rotary[key] = self._rotary(hidden, block.positions, *extra)
        return block.rotary[key]

    def _mask(self, block: Block, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Who sees whom, `(row or 1, 1, query, slot)`; None where attention needs no mask."""
        window = self.windows[layer]
        if window in block.masks:
            return block.masks[window]
        n_queries = hidden.shape[1]
        visible: torch.Tensor | None = None
        if block.start is None:
            slots = torch.arange(block.extent, device=hidden.device)
            visible = _causal(block.positions[:, :, None].to(hidden.device), slots, window)[:, None]
        elif n_queries > 1:
            # sdpa draws the plain causal triangle itself, and faster, when nothing came before
            triangle = block.start == 0 and (window is None or window >= n_queries)
            if not (triangle and self.attention == "sdpa"):
                first = block.cache.first_slot(layer, block.start)
                slots = torch.arange(first, block.start + n_queries, device=hidden.device)
                visible = _causal(block.positions[0][:, None].to(hidden.device), slots, window)[None, None]
        if visible is not None and self.attention == "eager":
            lowest = torch.finfo(hidden.dtype).min
            visible = torch.zeros(visible.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~visible, lowest)
        block.masks[window] = visible
        return visible


def _default_type(family: Family, window: int | None) -> str:
    return "sliding_attention" if family.sliding and window is not None else "full_attention"


def _trains_otherwise(hf_model: Any) -> bool:
    """Whether training mode changes what the layers do: dropout, or checkpointing, which leaves the cache out."""
    dropout = [m.p for m in hf_model.modules() if isinstance(m, nn.Dropout)]
    dropout.append(getattr(hf_model.config, "attention_dropout", 0))  # called as a function in most families
    return any(dropout) or any(getattr(module, "gradient_checkpointing", False) for module in hf_model.modules())


def _causal(queries: torch.Tensor, slots: torch.Tensor, window: int | None) -> torch.Tensor:
    visible = slots <= queries
    return visible if window is None else visible & (slots > queries - window)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar, which only flashes for a small local model."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(
    model: str | Path | tuple[Any, Any],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    **from_pretrained: Any,
) -> EarlyExitModel:
    """Load a model for early-exit decoding.

    Args:
        model: "demo" for the bundled model, a folder, a hub id, the path of a .gguf file, or a `(hf_model, tokenizer)`
            pair, which is taken as it is; the pair's tokenizer may be None.
        device: Where to put it; the CPU when not given.
        dtype: Of the weights; float32 on the CPU and the checkpoint's own elsewhere when not given.
        gguf_file: Name of a GGUF file in the folder; needs the packages gguf and accelerate (extra `gguf`).
        revision: Hub revision.
        **from_pretrained: Passed on to transformers' `from_pretrained`, e.g. attn_implementation, device_map.

    Raises:
        UnsupportedModelError: Before any weights are read, when the architecture is not in `FAMILIES`.
        ValueError: When the folder or id can't be loaded, or a pair comes with options that would change it.
    """
    if isinstance(model, tuple):
        if device is not None or dtype is not None or gguf_file is not None or revision is not None or from_pretrained:
            raise ValueError("a (model, tokenizer) pair is taken as it is; leave out device, dtype and loading options")
        return EarlyExitModel(*model)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = str(DEMO_FOLDER) if str(model) == "demo" else str(model)
    if gguf_file is None and source.endswith(".gguf"):
        source, gguf_file = str(Path(source).parent), Path(source).name
    where: dict[str, Any] = {"revision": revision} if revision else {}
    if gguf_file is not None:
        where["gguf_file"] = gguf_file
    try:
        check_supported(AutoConfig.from_pretrained(source, **where))
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        on_cpu = device is None or torch.device(device).type == "cpu"
        if dtype is None:
            dtype = torch.float32 if on_cpu and "device_map" not in from_pretrained else "auto"
        elif isinstance(dtype, str) and dtype != "auto":
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"there is no dtype '{dtype}'; float32 and bfloat16 are two")
            dtype = getattr(torch, dtype)
        with _quiet() if str(model) == "demo" else nullcontext():
            hf_model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **where, **from_pretrained)
        if device is not None:
            hf_model.to(torch.device(device))  # type: ignore[arg-type]  # typed for PreTrainedModel by transformers
    except UnsupportedModelError:
        raise
    except ImportError as error:
        hint = "; pip install 'lede-rl[gguf]'" if gguf_file else ""
        raise ValueError(f"cannot load model '{model}': {error}{hint}") from error
    # torch says by an assertion that it has no such device; transformers says by ValueError what a folder lacks
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"cannot load model '{model}': {first_line}") from error
    return EarlyExitModel(hf_model.eval(), tokenizer, str(model))
