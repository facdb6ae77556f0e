"""Branches: the drafter rolled on from a sample of its wrong drafts.

After a wrong draft the drafter reads its own text until verification tells it of the error. What it sees there can't be
read off the target's text, so the teacher runs it: layers 1..l over the wrong draft and over what they draft after it,
on the keys and values that those layers computed for the text before.

Departs from the paper (LEDE, arXiv 2606.03113), whose offline data know the target's text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lede.buffers.records import BRANCH_DEPTH, BRANCH_DTYPES, branch_shapes
from lede.cache import KVCache
from lede.collectors.branch_walk import Arrays, BranchCache, BranchWalk, Ints, draw_tokens
from lede.collectors.host_copies import send
from lede.collectors.texts import TaughtText
from lede.envs import Rules
from lede.models import EarlyExitModel
from lede.seeding import Purpose, numpy_stream

NUMBERS_AT_ONCE = 2**26
"""Most keys and values that a chunk of branches has: those of its texts in one layer, and its own in all layers;
256 MiB in float32. A branch that needs more is a chunk of its own."""

LOGITS_AT_ONCE = 2**24
"""Most logits that a chunk of branches reads at a layer; 64 MiB in float32."""

MAX_DEPTH = np.iinfo(np.int16).max


@dataclass(frozen=True)
class BranchRules:
    """Which wrong drafts get a branch, and how far it goes."""

    share: float = 0.1
    """Share of the wrong drafts of each candidate layer; 0 for none, 1 for all."""
    depth: int = BRANCH_DEPTH
    """Most positions that a branch follows; EOS and the budget end it earlier."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"branches must be a share within 0..1 of the wrong drafts, got {self.share}")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"branch_depth must be within 1..{MAX_DEPTH}, got {self.depth}")


@dataclass(frozen=True)
class Lesson:
    """What the teacher leaves behind: finished texts, read at every layer."""

    model: EarlyExitModel
    """The model."""
    rules: Rules
    """Candidates, budget, warp, `features.top_k`."""
    taught: Sequence[TaughtText]
    """The texts and what was read off them, in the order of the cache's rows; with their states when sampling."""
    cache: KVCache
    """Keys and values of the texts in all layers, with room for the longest prompt and the budget."""


@dataclass(frozen=True)
class WrongDrafts:
    """Drafts that verification would reject, `(draft,)` each."""

    text: Ints
    """Which of the texts."""
    row: Ints
    """Trace row of the decision, from 0."""
    layer: Ints
    """Layer that drafts."""
    luck: npt.NDArray[np.float64]  # (draft, 1 + depth)
    """Uniform numbers for the wrong draft and the tokens after it; used when sampling."""

    def __len__(self) -> int:
        return self.text.size

    def take(self, index: Ints) -> WrongDrafts:
        """Those at `index`."""
        return WrongDrafts(self.text[index], self.row[index], self.layer[index], self.luck[index])


@torch.no_grad()
def grow_branches(lesson: Lesson, branching: BranchRules, seed: int) -> list[Arrays]:
    """The branch arrays of `PromptTrace` for each text, by row and layer.

    A wrong draft that is EOS has no branch: nothing follows it.

    Args:
        lesson: The texts, read by the teacher.
        branching: Share and depth.
        seed: Of the choice and of what is drawn. Each prompt and layer has a stream of its own, so content depends on
            neither batch nor order.
    """
    drafts = choose_drafts(lesson, branching, seed)
    drafts = drafts.take(np.argsort(-drafts.layer, kind="stable"))  # a chunk goes no deeper than it has to
    size = _chunk_size(lesson, branching.depth)
    chunks = [np.arange(at, min(at + size, len(drafts))) for at in range(0, len(drafts), size)]
    grown = [_grow(lesson, drafts.take(chunk), branching.depth) for chunk in chunks]
    shapes = branch_shapes(0, branching.depth, lesson.model.n_layers)
    columns: Arrays = {
        name: np.concatenate([np.zeros(shapes[name], dtype), *(arrays[name] for arrays in grown)])
        for name, dtype in BRANCH_DTYPES.items()
    }
    found: list[Arrays] = []
    for i in range(len(lesson.taught)):
        mine = np.flatnonzero((drafts.text == i) & (columns["branch_length"] > 0))
        mine = mine[np.lexsort((drafts.layer[mine], drafts.row[mine]))]
        found.append({name: column[mine] for name, column in columns.items()})
    return found


def choose_drafts(lesson: Lesson, branching: BranchRules, seed: int) -> WrongDrafts:
    """Draw the wrong drafts that get a branch.

    A layer's draft is wrong with probability 1 - match, for every decision and candidate on its own. Of the wrong
    drafts of a layer on a text the share is taken, rounded up or down at random, so that no layer goes short and each
    draft has the same chance.
    """
    texts, layers, rows, lucks = [], [], [], []
    for i, taught in enumerate(lesson.taught):
        match = taught.columns["match"][: taught.n_decided]
        for layer in lesson.rules.candidates:
            rng = numpy_stream(seed, Purpose.BRANCHES, taught.text.prompt_index, layer)
            wrong = np.flatnonzero(rng.random(len(match)) >= match[:, layer - 1])
            n = int(branching.share * wrong.size + rng.random())
            texts.append(np.full(n, i))
            layers.append(np.full(n, layer))
            rows.append(np.sort(rng.choice(wrong, n, replace=False)))
            lucks.append(rng.random((n, 1 + branching.depth)))
    return WrongDrafts(*map(np.concatenate, (texts, rows, layers, lucks)))


def wrong_tokens(lesson: Lesson, drafts: WrongDrafts) -> torch.Tensor:
    """The tokens of wrong drafts, `(draft,)`.

    Greedy: what the layer finds likeliest. Sampling: a token that is drawn from the layer's q and rejected under the
    whole model's p has the law max(q - p, 0), divided by its sum.
    """
    model, warp = lesson.model, lesson.rules.warp
    sizes = [taught.n_decided for taught in lesson.taught]
    at = np.cumsum([0, *sizes])[drafts.text] + drafts.row
    if warp.greedy:
        token = np.concatenate([each.columns["token"][:n] for each, n in zip(lesson.taught, sizes, strict=True)])
        return send(token[at, drafts.layer - 1].astype(np.int64), model.device)
    read = [each.states[:n] for each, n in zip(lesson.taught, sizes, strict=True) if each.states is not None]
    states = torch.cat(read)  # (position, layer, width)
    places, columns = send(at, states.device), send(drafts.layer - 1, states.device)
    q, p = (warp.probabilities(model.head(states[places, c])) for c in (columns, model.n_layers - 1))
    excess = (q - p).clamp_min(0)
    # rejected although q equals p up to rounding: nothing is left over, and p is as good a law
    return draw_tokens(torch.where(excess.sum(-1, keepdim=True) > 0, excess, p), send(drafts.luck[:, 0], excess.device))


def _grow(lesson: Lesson, drafts: WrongDrafts, depth: int) -> Arrays:
    """Branches of a chunk of wrong drafts, those of the deepest layers first."""
    device = lesson.model.device
    prompts = np.asarray([len(taught.text.prompt_ids) for taught in lesson.taught])
    start = prompts[drafts.text] + drafts.row + 1
    cache = BranchCache(lesson.cache, send(drafts.text, device), send(start, device), depth)
    tokens = wrong_tokens(lesson, drafts)
    walk = BranchWalk(lesson.model, lesson.rules, cache, start, drafts.layer, tokens, drafts.luck[:, 1:])
    # the last position that can be reached is that of the budget's last token
    arrays = walk.run(room=lesson.rules.max_new_tokens - 1 - drafts.row)
    return {**arrays, "branch_row": drafts.row}


def _chunk_size(lesson: Lesson, depth: int) -> int:
    """Branches that fit into the bounds at once, at least one."""
    keys, values = lesson.cache.keys[0], lesson.cache.values[0]
    assert keys is not None, "the teacher has been through the layers"
    assert values is not None
    slots = lesson.cache.capacity + depth * lesson.rules.candidates[-1]
    numbers = slots * (keys.shape[1] * keys.shape[3] + values.shape[1] * values.shape[3])
    return max(1, min(NUMBERS_AT_ONCE // numbers, LOGITS_AT_ONCE // lesson.model.vocab_size))
