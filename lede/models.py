"""Any span of layers of a transformers decoder: embed, layers [a, b), norm and head.

Everything here works on the modules of the transformers model itself, so logits after all layers are bit-equal to the
model's own. What is supported stands in `lede.families`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging

from lede.adapters import adapted
from lede.blocks import MAX_ROWS, Block, Tables, attention_of
from lede.cache import KVCache, Place, neighbours
from lede.devices import home_of, numbers_on, places_of
from lede.ends import Embedding, Readout, part
from lede.families import FAMILIES, Family, UnsupportedModelError, check_supported
from lede.fast_linear import accelerated
from lede.model_place import DEMO_FOLDER, loading_failure, model_place
from lede.snapshot import Snapshot, trains_otherwise
from lede.sublayers import Record, Sublayers

if TYPE_CHECKING:
    from lede.compiled_layers import CompiledLayers
    from lede.packed_weights import PackedWeights
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

_CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past", "past_key_value")


class EarlyExitModel:
    """A transformers causal LM that can be run span by span and read at any layer.

    Args:
        hf_model: The causal LM; taken as it is, neither cast nor moved. Of a peft model the causal LM inside.
        tokenizer: Its tokenizer, or None when only token ids are used.
        name: What to call it in reports; its path, hub id or class.
    """

    def __init__(self, hf_model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        hf_model = adapted(hf_model)
        self.config = hf_model.config
        self.family = check_supported(self.config)
        _ = self.attention
        self.hf_model = hf_model
        self.tokenizer = tokenizer
        self.name = name or type(hf_model).__name__
        self.compile_seconds = 0.0
        self.packed: PackedWeights | None = None
        self.revision = 0
        """How often somebody changed the transformers model since."""
        self._assemble()

    def _assemble(self) -> None:
        """Take the parts of the transformers model as they are now, with fast kernels where there are any.

        Raises:
            ValueError: It trains.
            UnsupportedModelError: It has no head, or layers without weights.
        """
        hf_model = self.hf_model
        if trains_otherwise(hf_model):
            raise ValueError(
                "the model is in training mode and has dropout or gradient checkpointing; call model.eval() first"
            )
        if hf_model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{type(hf_model).__name__} has no LM head; load it as a causal language model")
        self._snapshot = Snapshot(hf_model)
        stack = getattr(hf_model, self.family.decoder)
        self._embed = Embedding(hf_model, self.family)
        self.readout = Readout(hf_model, self.family)
        self.readout.head = accelerated(self.readout.head)
        rotary: nn.Module | None = getattr(stack, self.family.rotary, None) if self.family.rotary else None
        live: Any = part(stack, self.family.layers)
        layers: list[nn.Module] = [accelerated(layer) for layer in live]
        self.n_layers = len(layers)
        self._layers = layers
        self.steps = list(enumerate(layers))
        self.sublayers = Sublayers(self.family, layers)
        self.compiled: CompiledLayers | None = None
        types = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        self.layer_types = list(types) if types else [_default_type(self.family, window)] * self.n_layers
        self.windows = [window if t == "sliding_attention" else None for t in self.layer_types]
        typed = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        types_told = self.layer_types if typed and self.family.rotary_by_type else [""] * self.n_layers
        self.places = places_of(layers)
        self.tables = Tables(self.config, rotary, types_told, self.windows, self.places, self.max_positions)
        arguments = inspect.signature(layers[0].forward).parameters
        self.cache_argument = next(a for a in _CACHE_ARGUMENTS if a in arguments)

    def refresh(self) -> None:
        """Notice what somebody changed in the transformers model: modules, hooks, replaced forwards, training mode.

        Decoding asks at the start of each text. Compiled layers are given up then, and a warning says so; packed
        weights are packed anew, also where their numbers alone have changed.

        Raises:
            ValueError: The model can't be decoded as it is now.
        """
        if self._snapshot.fits(self.hf_model):
            if self.packed is not None and self.packed.renew():
                self.revision += 1
            if self.compiled is not None:
                self.compiled.renew()
            return
        if self.compiled is not None:
            warnings.warn(
                "the transformers model was changed, so its layers run eagerly; compile() compiles them again",
                stacklevel=2,
            )
        self._assemble()
        self.revision += 1
        if self.packed is not None:
            self.pack_weights()

    def __repr__(self) -> str:
        kind = self.config.model_type
        return f"EarlyExitModel({self.name}: {kind}, {self.n_layers} layers, {self.dtype}, {self.device})"

    @property
    def attention(self) -> str:
        """The attention that transformers runs, "sdpa" or "eager"; it can be switched on the transformers model.

        Raises:
            UnsupportedModelError: It is another one.
        """
        return attention_of(self.config)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return home_of(self._embed.tokens)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return next(self._embed.tokens.parameters()).dtype

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
        self.refresh()
        making = () if self.compiled is None else self.compiled.making
        return KVCache(self.n_layers, capacity, batch_size, self.windows, *making)

    def block(self, cache: KVCache, start: int, n_tokens: int) -> Block:
        """Place `n_tokens` tokens at positions `start, start + 1, ...` of every row of the cache."""
        cache.place(start)
        positions = torch.arange(start, start + n_tokens, device=self.device)[None]
        return Block(positions, cache, start, None)

    def ragged_block(self, cache: KVCache, positions: torch.Tensor, rows: torch.Tensor) -> Block:
        """Place tokens at `positions` `(row, token)` of the given rows `(row,)` of the cache.

        Rows shorter than the block are padded on the right by tokens at later positions: a query never looks past its
        own position, and the slots are overwritten when the row gets there.
        """
        extent = int(positions.max()) + 1
        if extent > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens, {extent} were needed")
        place = Place(neighbours(rows.tolist()) or rows, rows[:, None], positions, 0, extent)
        return Block(positions, cache, None, place)

    def rows_block(self, cache: KVCache, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> Block:
        """Place `lengths[i]` tokens of the row `rows[i]` of the cache from position `starts[i]` on.

        Padded like a `ragged_block`, for a caller that knows its rows: nothing is asked of the device, and rows that
        are neighbours or start together cost no copies or masks. Padding past the capacity goes to the last slot, which
        no row may be using then. Nobody counts how long the rows are.
        """
        lowest, width = min(starts), max(lengths)
        extent = max(start + length for start, length in zip(starts, lengths, strict=True))
        if extent > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens, {extent} were needed")
        aligned, span = max(starts) == lowest, neighbours(rows)
        places = torch.arange(lowest, lowest + width, device=(device := self.device))[None]
        if not aligned:
            places = places + numbers_on(device, [[start - lowest] for start in starts])
            if max(starts) + width > cache.capacity:
                places.clamp_(max=cache.capacity - 1)
        index = numbers_on(device, rows) if span is None else torch.arange(span.start, span.stop, device=device)
        slots = places if span is None or not aligned else slice(lowest, lowest + width)
        place = Place(span or index, index[:, None], slots, lowest, extent)
        return Block(places, cache, lowest if aligned else None, place)

    def compile(self, ahead: bool = True) -> bool:
        """Compile the layers for the few rows of decoding, in seconds; what they say differs by rounding only.

        On the CPU inductor needs a C++ compiler, unless `lede compile` was run before and `ahead` says to use that; on
        a GPU each layer becomes a CUDA graph. Where it does not work the model runs eagerly, and a warning says why.

        Returns:
            Whether the layers are compiled; `compile_seconds` says how long it took.
        """
        from lede.compilation import compile_layers

        return compile_layers(self, ahead)

    def pack_weights(self) -> bool:
        """Pack the weights for products of few rows: float32 or bfloat16 on the CPU, for as much memory again.

        Where it can't be done the model runs as before, and a warning says why. Weights that somebody changes later
        are packed anew at the start of the next text.

        Returns:
            Whether they are packed; `packed` says how many seconds and bytes it took.
        """
        from lede.packed_weights import pack_weights

        return pack_weights(self)

    def embed(self, token_ids: torch.Tensor, block: Block) -> torch.Tensor:
        """Hidden states before the first layer, `(row, token, width)`, of ids `(row, token)`."""
        return self._embed(token_ids, block.positions)

    def run_layers(self, hidden: torch.Tensor, first: int, last: int, block: Block) -> torch.Tensor:
        """Hidden states after `last` layers of states after `first` layers, `(row, token, width)`.

        Layers first+1..last run once over the block's tokens and extend the cache.
        """
        return self._run(hidden, self.steps[first:last], block)

    def run_skipping(self, hidden: torch.Tensor, plan: SkipSublayers, block: Block) -> torch.Tensor:
        """Hidden states of a draft with gaps, `(row, token, width)`, of states after the layers before the first gap.

        The layers from the first gap to the last run once without the sublayers that the plan leaves out. Those whose
        attention is left out don't extend the cache.

        Raises:
            ValueError: The plan doesn't fit the model.
            UnsupportedModelError: The layers can't be run in part.
        """
        return self._run(hidden, self.sublayers.skipping(plan), block)

    def run_recording(self, hidden: torch.Tensor, block: Block, record: Record) -> torch.Tensor:
        """Hidden states after all layers, `(row, token, width)`; `record` sees what each sublayer adds to them.

        Raises:
            UnsupportedModelError: The layers can't be run in part.
        """
        return self.run_eagerly(hidden, self.sublayers.recording(record), block)

    def check_sublayers(self) -> None:
        """Raise UnsupportedModelError when `run_skipping` and `run_recording` can't run this model's layers."""
        self.sublayers.check()

    def _run(self, hidden: torch.Tensor, steps: Iterable[tuple[int, nn.Module]], block: Block) -> torch.Tensor:
        """States after these layers, each given with its place in the stack."""
        if self.compiled is not None and self.compiled.takes(block, hidden.shape[1]):
            return self.compiled.run(hidden, steps, block)
        return self.run_eagerly(hidden, steps, block)

    def run_eagerly(self, hidden: torch.Tensor, steps: Iterable[tuple[int, nn.Module]], block: Block) -> torch.Tensor:
        """States after these layers, run as they are, also where they are compiled."""
        if block.place is not None:
            block.cache.place_rows(block.place)
        elif block.start is not None:
            block.cache.place(block.start)
        for i, layer in steps:
            arguments = self.tables.arguments(block, i, hidden)
            out = layer(hidden, **arguments, **{self.cache_argument: block.cache})
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """A head read: logits `(row, token, vocabulary)` of hidden states through the final norm and the LM head."""
        compiled = self.compiled if hidden.shape[0] == 1 and hidden.shape[1] <= MAX_ROWS else None
        read = self.readout if compiled is None else compiled.read
        logits = read(hidden)
        return logits if self.places is None else logits.to(self.device)


def _default_type(family: Family, window: int | None) -> str:
    return "sliding_attention" if family.sliding and window is not None else "full_attention"


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
    compile: bool = False,
    pack_weights: bool = False,
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
        compile: Compile the layers, see `EarlyExitModel.compile`.
        pack_weights: Pack the weights, see `EarlyExitModel.pack_weights`.
        **from_pretrained: Passed on to transformers' `from_pretrained`, e.g. attn_implementation, device_map.

    Raises:
        UnsupportedModelError: Before any weights are read, when the architecture is not in `FAMILIES`.
        ValueError: When it is no folder, id or pair or can't be loaded, or a pair comes with options that change it.
    """
    if isinstance(model, tuple):
        if device is not None or dtype is not None or gguf_file is not None or revision is not None or from_pretrained:
            raise ValueError("a (model, tokenizer) pair is taken as it is; leave out device, dtype and loading options")
        return _prepared(EarlyExitModel(*model), compile, pack_weights)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source, where = model_place(model, gguf_file, revision)
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
        hint = "; pip install 'lede-rl[gguf]'" if "gguf_file" in where else ""
        raise ValueError(f"cannot load model '{model}': {error}{hint}") from error
    # torch says by an assertion that it has no such device; transformers says by ValueError what a folder lacks
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise ValueError(loading_failure(model, source, error)) from error
    return _prepared(EarlyExitModel(hf_model.eval(), tokenizer, str(model)), compile, pack_weights)


def _prepared(model: EarlyExitModel, compile: bool, pack_weights: bool) -> EarlyExitModel:
    _ = pack_weights and model.pack_weights()
    _ = compile and model.compile()
    return model
