"""Reading a store: its prompts in order, its columns whole, its view for d3rlpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Generic, Literal, Protocol, Self, TypeVar, cast

from lede.buffers.columns import Columns, check_record, row_arrays, unstack
from lede.buffers.records import PromptRollout, PromptTrace
from lede.buffers.settings import Kind, StoreSettings
from lede.buffers.shards import Commit, check_shards, read_commits, read_settings, read_shard
from lede.buffers.storage import Place, Storage, storage_for

if TYPE_CHECKING:
    from d3rlpy.dataset import ReplayBuffer

    from lede.buffers.d3rlpy_view import Greedy

R = TypeVar("R", PromptTrace, PromptRollout)

Episodes = Literal["token", "prompt"]


class Source(Protocol):
    """Where a store's records come from: memory or shards."""

    @property
    def prompt_indices(self) -> tuple[int, ...]:
        """Indices of the prompts, ascending."""

    @property
    def n_rows(self) -> int:
        """Rows of all prompts."""

    def records(self) -> Iterator[PromptTrace | PromptRollout]:
        """The records by ascending prompt index."""


class MemorySource:
    """Records held in memory."""

    def __init__(self, records: Iterable[PromptTrace | PromptRollout], settings: StoreSettings) -> None:
        self._records = sorted(records, key=lambda record: record.prompt_index)
        self.prompt_indices = tuple(record.prompt_index for record in self._records)
        self.n_rows = sum(record.n_rows for record in self._records)
        for record in self._records:
            check_record(record, settings)
        if len(set(self.prompt_indices)) < len(self.prompt_indices):
            repeated = sorted({i for i in self.prompt_indices if self.prompt_indices.count(i) > 1})
            raise ValueError(f"prompts {repeated} are there more than once")

    def records(self) -> Iterator[PromptTrace | PromptRollout]:
        """The records by ascending prompt index."""
        return iter(self._records)


class ShardSource:
    """Records in committed shards; a shard is in memory only while its prompts are being passed on.

    A prompt that two shards hold is taken from the first by name.

    Raises:
        StoreError: A file of a shard is missing or altered.
    """

    def __init__(self, storage: Storage, settings: StoreSettings, verify: bool) -> None:
        self.storage, self.settings = storage, settings
        self.commits = read_commits(storage)
        check_shards(storage, self.commits, verify)
        self._home: dict[int, Commit] = {}
        for commit in self.commits:
            for index in commit.prompts:
                self._home.setdefault(index, commit)
        self.prompt_indices = tuple(sorted(self._home))
        self.duplicates = sum(len(commit.prompts) for commit in self.commits) - len(self._home)

    @cached_property
    def n_rows(self) -> int:
        """Rows of all prompts, each prompt once."""
        total = sum(commit.rows for commit in self.commits)
        return total if not self.duplicates else sum(record.n_rows for record in self.records())

    def shard(self, commit: Commit) -> list[PromptTrace | PromptRollout]:
        """The records of one shard as they lie in it, but for those that are taken from another."""
        columns = read_shard(self.storage, commit, self.settings)
        loaded = unstack(columns, self.settings, f"{self.storage.url}: shard {commit.name}")
        return [record for record in loaded if self._home[record.prompt_index] is commit]

    def records(self) -> Iterator[PromptTrace | PromptRollout]:
        """The records by ascending prompt index."""
        waiting: dict[str, dict[int, PromptTrace | PromptRollout]] = {}
        for index in self.prompt_indices:
            commit = self._home[index]
            if commit.name not in waiting:
                waiting[commit.name] = {record.prompt_index: record for record in self.shard(commit)}
            shard = waiting[commit.name]
            yield shard.pop(index)
            if not shard:
                del waiting[commit.name]


class Store(Generic[R]):
    """What both kinds of store have in common; iterating gives the prompts by ascending index.

    The order of the shards, and so of the workers that wrote them, doesn't show. Stores in memory (a synthesised one,
    or a part of another: `select`) behave like those on disk.

    Args:
        settings: What the records were made with.
        records: One a prompt, in any order.
    """

    kind: Kind

    def __init__(self, settings: StoreSettings, records: Iterable[R] = ()) -> None:
        if settings.kind != self.kind:
            raise ValueError(f"{type(self).__name__} needs settings of kind '{self.kind}', got '{settings.kind}'")
        self.settings = settings
        self.path: str | None = None
        self._source: Source = MemorySource(records, settings)

    @classmethod
    def from_shards(cls, place: Place, settings: StoreSettings, verify: bool = False) -> Self:
        """A store on disk; see `open_store`."""
        store, storage = cls(settings), storage_for(place)
        store.path, store._source = storage.url, ShardSource(storage, settings, verify)
        return store

    @property
    def prompt_indices(self) -> tuple[int, ...]:
        """Indices of the prompts, ascending."""
        return self._source.prompt_indices

    @property
    def n_rows(self) -> int:
        """Decisions (transitions) or decided tokens (traces) of all prompts."""
        return self._source.n_rows

    @property
    def n_shards(self) -> int:
        """Committed shards; 0 for a store in memory."""
        return len(self._source.commits) if isinstance(self._source, ShardSource) else 0

    @cached_property
    def shards(self) -> tuple[Commit, ...]:
        """Committed shards by their first prompt, whoever wrote them; none for a store in memory."""
        if not isinstance(self._source, ShardSource):
            return ()
        return tuple(sorted(self._source.commits, key=lambda commit: (min(commit.prompts, default=-1), commit.name)))

    def shard(self, commit: Commit) -> list[R]:
        """The records of one of `shards`, read from disk, as they lie in it; a prompt of two shards comes once."""
        if not isinstance(self._source, ShardSource):
            raise ValueError("a store in memory has no shards; iterate it")
        return cast("list[R]", self._source.shard(commit))

    @property
    def duplicates(self) -> int:
        """Copies of prompts that were committed more than once and are passed over."""
        return self._source.duplicates if isinstance(self._source, ShardSource) else 0

    @cached_property
    def prompts(self) -> list[R]:
        """The records of all prompts by ascending index, read once and kept in memory."""
        return list(self)

    def select(self, prompt_indices: Sequence[int]) -> Self:
        """A store in memory with some of the prompts, e.g. a part held out.

        Raises:
            ValueError: A prompt is not there.
        """
        wanted = {int(index) for index in prompt_indices}
        missing = sorted(wanted - set(self.prompt_indices))
        if missing:
            raise ValueError(f"the store has no prompts {missing[:10]}; it has {len(self)}")
        return type(self)(self.settings, [record for record in self if record.prompt_index in wanted])

    def arrays(self) -> Columns:
        """Whole columns by name, rows of all prompts end to end, with `prompt_index` for every row."""
        return row_arrays(list(self), self.settings)

    def __iter__(self) -> Iterator[R]:
        """The records by ascending prompt index; from disk, a shard at a time unless `prompts` was read."""
        if "prompts" in self.__dict__:
            return iter(self.prompts)
        return cast("Iterator[R]", self._source.records())

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompt_indices)

    def __repr__(self) -> str:
        """The store's size and place."""
        where = self.path or "memory"
        return f"{type(self).__name__}({len(self)} prompts, {self.n_rows} rows, {where})"


class TraceStore(Store[PromptTrace]):
    """Full-information traces, one `PromptTrace` a prompt. Columns of `arrays`: `(token, layer)` each."""

    kind = "traces"


class TransitionStore(Store[PromptRollout]):
    """Transitions, one `PromptRollout` a prompt."""

    kind = "transitions"

    def to_d3rlpy(
        self, episode: Episodes = "token", gamma: float = 1.0, n_steps: int = 1, greedy: Greedy | None = None
    ) -> ReplayBuffer:
        """The store as a d3rlpy replay buffer, for any discrete algorithm of d3rlpy.

        Always two actions, whichever occur. A token episode ends terminated; a prompt episode ends terminated at EOS
        and truncated at the budget, where one closing row holds the state after the last decision, so that the last
        reward counts.

        Args:
            episode: `token`: one generation step is an episode, as in the paper; `prompt`: all of a prompt.
            gamma: Discount factor of the n-step returns. Give the algorithm the same one (it is kept as
                `buffer.transition_picker.gamma`).
            n_steps: Rewards in a return.
            greedy: Actions `(row,)` that the target network would choose for observations `(row, feature)`. Cuts a
                return at the first later action that is not greedy. None never cuts.

        Raises:
            ValueError: Prompt episodes with gamma < 1, or a store without any decision.
        """
        from lede.buffers.d3rlpy_view import replay_buffer

        return replay_buffer(self, episode, gamma, n_steps, greedy)


def open_store(path: Place, verify: bool = False) -> TransitionStore | TraceStore:
    """Open a store for reading; what is committed later doesn't show.

    Args:
        path: Folder or URL of the store.
        verify: Whether to compare the checksum of every file now, which reads the whole store; otherwise every file
            must be there with its committed size, and checksums are compared when a shard is read.

    Raises:
        StoreError: There is no store, or a file of a committed shard is missing or altered.
    """
    storage = storage_for(path)
    settings = read_settings(storage)
    kind: type[TransitionStore] | type[TraceStore] = TraceStore if settings.kind == "traces" else TransitionStore
    return kind.from_shards(storage, settings, verify)
