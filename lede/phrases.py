"""A memory of phrases: what followed the n-grams of other texts, to draft where a text has nothing of its own to copy.

Every n-gram of up to `max_suffix` tokens that an answer went on from is a node: the token that most often followed, how
often it did, and how often any did. The nodes of n tokens are sorted by their parent, the node of the last n - 1 of
them, and the token before these; so an n-gram is found exactly, by a binary search among siblings for each of its
tokens, in arrays that lie in a file as they lie in memory. A proposal is a chain: each token is what followed the
longest known end of the text with the tokens proposed before it.

Source: REST (He et al., arXiv 2311.08252), which drafts from a datastore. Departs from it: no suffix array and no tree
of candidates but one chain of most frequent tokens, whose back-off happens anew at every token; only what was written
counts, prompts are context; and the text itself goes before the memory (`lede.lookup`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from lede.atomic import write_atomically
from lede.lookup import MAX_MATCH

if TYPE_CHECKING:
    from lede.models import EarlyExitModel

Tokens = Sequence[int] | npt.NDArray[np.int64]
"""Token ids."""

Text = tuple[Tokens, Tokens]
"""A prompt, which is context alone and may be empty, and what was written behind it."""

MAX_SUFFIX = 4
"""Tokens of the longest n-grams unless told otherwise; longer ones brought nothing."""
FORMAT = 1
"""Version of the file's layout."""

_BITS = 32  # of a token id in a key, below the parent's number
_TOKEN = (1 << _BITS) - 1
_ARRAYS = {"format": "i8", "keys": "i8", "followed": "i4", "count": "i4", "total": "i4", "first": "i8", "texts": "i8"}
"""Tensors of a file and their types; beside them the tokenizer's hash, as bytes."""


class Phrase(NamedTuple):
    """What is known of an n-gram."""

    node: int
    """Its number."""
    length: int
    """Its tokens."""
    token: int
    """What most often followed."""
    times: int
    """How often it did."""
    total: int
    """How often any token did."""


class PhraseMemory:
    """The n-grams of some texts; immutable, so that copies of a policy share it.

    Attributes:
        tokenizer: Hash of the tokenizer that the token ids belong to (`lede.fingerprints`); None where it is unknown.
        max_suffix: Tokens of the longest n-grams.
        texts: Digests of what it was made of, `(text,)`, so that nobody is measured on texts that he remembers.

    Args:
        arrays: As `from_texts` makes them: `keys`, `followed`, `count` and `total` of each node, `(node,)`, `first`
            with the first node of each length and the number of nodes, `(max_suffix + 1,)`, and `texts`.
        tokenizer: As above.

    Raises:
        ValueError: The arrays don't fit together.
    """

    def __init__(self, arrays: dict[str, npt.NDArray[Any]], tokenizer: str | None = None) -> None:
        self._arrays = {name: np.ascontiguousarray(arrays[name]) for name in sorted(_ARRAYS) if name != "format"}
        self.tokenizer = tokenizer
        self.texts = self._arrays["texts"]
        _check(self._arrays)
        # memoryviews give plain numbers, and bisect reads them without a copy
        self._keys, self._followed, self._count, self._total = (
            self._arrays[name].data for name in ("keys", "followed", "count", "total")
        )
        first: list[int] = self._arrays["first"].tolist()
        self.max_suffix = len(first) - 1
        self._shortest = first[1]
        self._child = _children(self._arrays["keys"], first).data

    @classmethod
    def from_texts(
        cls, texts: Iterable[Text], max_suffix: int = MAX_SUFFIX, tokenizer: str | None = None
    ) -> PhraseMemory:
        """Remember texts.

        Args:
            texts: Prompts and what was written behind them.
            max_suffix: Tokens of the longest n-grams, which may begin in the prompt.
            tokenizer: Hash of the tokenizer.

        Raises:
            ValueError: `max_suffix` is out of range, or a token id is.
        """
        if not 1 <= max_suffix <= MAX_MATCH:
            raise ValueError(f"a memory's max_suffix must be within 1..{MAX_MATCH}, got {max_suffix}")
        pieces, places, written, digests = [np.zeros(0, dtype=np.int64)], [], [], []
        for prompt, answer in texts:
            before, after = (np.asarray(part, dtype=np.int64).reshape(-1) for part in (prompt, answer))
            digests.append(digest_of_text(before, after))
            before = before[-max_suffix:]
            pieces += [before, after]
            places.append(np.arange(before.size + after.size))
            written.append(np.arange(before.size + after.size) >= before.size)
        tokens = np.concatenate(pieces)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 31:
            raise ValueError(f"token ids must be within 0..2**31 - 1, got {tokens.min()} to {tokens.max()}")
        place = np.concatenate([np.zeros(0, dtype=np.int64), *places])
        follows = np.flatnonzero(np.concatenate([np.zeros(0, dtype=np.bool_), *written]))
        return cls({**_nodes(tokens, place, follows, max_suffix), "texts": np.asarray(digests, dtype="i8")}, tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> PhraseMemory:
        """Read what `save` wrote.

        Raises:
            ValueError: There is no such file, or it holds no sound memory.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read a memory of phrases from {path}: {error.strerror}") from None
        return cls.from_bytes(content, str(path))

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> PhraseMemory:
        """The memory that `to_bytes` wrote; `where` tells the file in messages.

        Raises:
            ValueError: They hold no sound memory.
        """
        try:
            found = safetensors.numpy.load(content)
            odd = [name for name, kind in _ARRAYS.items() if name not in found or found[name].dtype != np.dtype(kind)]
            if odd or found["format"].tolist() != [FORMAT]:
                raise ValueError(f"its {' and '.join(odd) or 'format'} is none that this version reads")
            tokenizer = found["tokenizer"].tobytes().decode("ascii") if "tokenizer" in found else ""
            return cls(found, tokenizer or None)
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{where} holds no sound memory of phrases: {' '.join(str(error).split())}") from None

    def to_bytes(self) -> bytes:
        """The content of a file: safetensors."""
        name = np.frombuffer((self.tokenizer or "").encode("ascii"), dtype=np.uint8)
        return safetensors.numpy.save({**self._arrays, "format": np.asarray([FORMAT], dtype="i8"), "tokenizer": name})

    def save(self, path: str | Path) -> None:
        """Write a file, whole or not at all.

        Raises:
            ValueError: It can't be written.
        """
        try:
            write_atomically(Path(path), self.to_bytes())
        except OSError as error:
            raise ValueError(f"cannot write a memory of phrases to {path}: {error}") from error

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: what tells memories apart."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id in it."""
        keys, followed = self._arrays["keys"], self._arrays["followed"]
        return 1 + max(int((keys & _TOKEN).max(initial=-1)), int(followed.max(initial=-1)))

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes, in memory as in a file."""
        return sum(array.nbytes for array in self._arrays.values())

    def __len__(self) -> int:
        """N-grams."""
        return len(self._keys)

    def find(self, tokens: Sequence[int], longest: int = MAX_MATCH, shortest: int = 1) -> Phrase | None:
        """The longest n-gram that a text ends with.

        Args:
            tokens: The text, or as much of its end as the longest n-gram has.
            longest: Most tokens of it.
            shortest: Fewest tokens of it.
        """
        keys, child = self._keys, self._child
        parent = length = begin = 0
        end = self._shortest
        for place in range(min(longest, self.max_suffix, len(tokens))):
            key = parent << _BITS | tokens[-1 - place]
            node = bisect_left(keys, key, begin, end)
            if node == end or keys[node] != key:
                break
            parent, length, begin, end = node, place + 1, child[node], child[node + 1]
        if length < max(shortest, 1):
            return None
        return Phrase(parent, length, self._followed[parent], self._count[parent], self._total[parent])

    def chain(self, tokens: Sequence[int], length: int, longest: int = MAX_MATCH, shortest: int = 1) -> list[int]:
        """What most often followed, token by token, each with those before it; fewer than `length` where all is new."""
        context = list(tokens[-self.max_suffix :])
        known = len(context)
        while len(context) < known + length:
            found = self.find(context, longest, shortest)
            if found is None:
                break
            context.append(found.token)
        return context[known:]

    def known(self, prompts: Iterable[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]) -> int:
        """How many of some texts it was made of, told by their prompts."""
        mine = set(self.texts.tolist())
        return sum(digest_of_text(prompt, answer) in mine for prompt, answer in prompts)

    def check_tokenizer(self, tokenizer: str | None, vocab_size: int, whose: str) -> None:
        """Raise ValueError where the memory's token ids are of another tokenizer, or out of a vocabulary."""
        if None not in (self.tokenizer, tokenizer) and self.tokenizer != tokenizer:
            raise ValueError(
                f"the memory of phrases was made with another tokenizer than that of {whose} ("
                f"{str(self.tokenizer)[:12]} and {str(tokenizer)[:12]}): make one with `lede phrases` for this model"
            )
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"the memory of phrases holds token {self.vocab_size - 1}, the vocabulary of {whose} has {vocab_size} "
                "entries: make one with `lede phrases` for this model"
            )

    def check_model(self, model: EarlyExitModel) -> None:
        """Raise ValueError when its token ids are not the model's."""
        from lede.fingerprints import hash_tokenizer

        known = self.tokenizer is not None and model.tokenizer is not None
        self.check_tokenizer(
            hash_tokenizer(model.tokenizer) if known else None, model.vocab_size, f"model '{model.name}'"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PhraseMemory:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PhraseMemory, (self._arrays, self.tokenizer)

    def __repr__(self) -> str:
        """Its sizes."""
        return f"PhraseMemory({len(self)} n-grams of up to {self.max_suffix} tokens, {self.texts.size} texts)"


def digest_of_text(prompt: npt.NDArray[np.int64], answer: npt.NDArray[np.int64]) -> int:
    """Tells a text by its prompt, or by itself where it has none; 64 bits, signed."""
    content = np.ascontiguousarray(prompt if prompt.size else answer, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _nodes(
    tokens: npt.NDArray[np.int64], place: npt.NDArray[np.int64], follows: npt.NDArray[np.int64], max_suffix: int
) -> dict[str, npt.NDArray[Any]]:
    """The nodes of all texts, shortest n-grams first.

    Args:
        tokens: Of all texts, one behind the other.
        place: Of each within its text.
        follows: Tokens that count as having followed something.
        max_suffix: Tokens of the longest n-grams.
    """
    node, first = np.zeros(tokens.size, dtype=np.int64), [0]
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in ("keys", "followed", "count", "total")}
    for length in range(1, max_suffix + 1):
        follows = follows[place[follows] >= length]
        keys, which, total = np.unique(
            node[follows] << _BITS | tokens[follows - length], return_inverse=True, return_counts=True
        )
        pairs, count = np.unique(which.reshape(-1) << _BITS | tokens[follows], return_counts=True)
        # of each n-gram the pair with the largest count, of equals the smallest token
        order = np.lexsort((-pairs, count, pairs >> _BITS))
        owner = (pairs >> _BITS)[order]
        best = order[np.flatnonzero(np.append(owner[1:] != owner[:-1], True))] if owner.size else order
        for name, column in zip(columns, (keys, pairs[best] & _TOKEN, count[best], total), strict=True):
            columns[name].append(column.astype(_ARRAYS[name]))
        node[follows] = first[-1] + which.reshape(-1)
        first.append(first[-1] + keys.size)
    return {**{name: np.concatenate(parts) for name, parts in columns.items()}, "first": np.asarray(first, dtype="i8")}


def _children(keys: npt.NDArray[np.int64], first: Sequence[int]) -> npt.NDArray[np.int64]:
    """The first child of each node, and where those of the last one end, `(node + 1,)`: siblings lie together."""
    starts = [
        begin + np.searchsorted(keys[begin:end] >> _BITS, np.arange(parents, begin))
        for parents, begin, end in zip(first, first[1:], (*first[2:], first[-1]), strict=False)
    ]
    return np.concatenate([*starts, np.asarray([keys.size])]).astype(np.int64)


def _check(arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Raise ValueError unless a search in the arrays ends well whatever it searches for."""
    keys, first = arrays["keys"], arrays["first"]
    sizes = {arrays[name].shape for name in ("keys", "followed", "count", "total")}
    if sizes != {(keys.size,)} or arrays["texts"].ndim != 1:
        raise ValueError(f"its columns have shapes {sorted(sizes)}")
    spans = first.ndim == 1 and 2 <= first.size <= MAX_MATCH + 1 and first[0] == 0 and first[-1] == keys.size
    if not spans or (np.diff(first) < 0).any():
        raise ValueError("its n-grams are not laid out by length")
    for length, (begin, end) in enumerate(zip(first[:-1].tolist(), first[1:].tolist(), strict=True), 1):
        here = keys[begin:end]
        parent = here >> _BITS
        low, high = (0, 1) if length == 1 else (int(first[length - 2]), begin)
        if here.size and ((np.diff(here) <= 0).any() or parent[0] < low or parent[-1] >= high):
            raise ValueError(f"its n-grams of {length} tokens are not in order")
    if keys.size and (
        arrays["followed"].min() < 0 or arrays["count"].min() < 1 or (arrays["count"] > arrays["total"]).any()
    ):
        raise ValueError("its counts are none")
