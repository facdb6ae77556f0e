"""`generate`: what it takes, refuses and returns; the work it does, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    TextStreamer,
)

import lede
from lede.generation import generate
from lede.models import load_model
from lede.policies import (
    ExitAt,
    LearnedPolicy,
    PreScan,
    PreScanState,
    RandomPolicy,
    StaticPolicy,
    ThresholdPolicy,
)
from lede.statistics import SECTIONS, DecodingStats, Meter
from tests.ending_models import layer_logits
from tests.tiny_models import N_LAYERS, plain_generate, prompt, tiny_hf_model, tiny_model

IDS = prompt(0, 7)


def test_decoding_time_ends_before_the_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    done, own = [], Meter.stats

    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            done.append("text")
            return "text"

        def get_vocab(self) -> dict[str, int]:
            return {}

    def stats(meter: Meter) -> DecodingStats:
        done.append("stats")
        return own(meter)

    monkeypatch.setattr(Meter, "stats", stats)
    out = generate(load_model((tiny_hf_model("llama"), Tokenizer())), input_ids=IDS, max_new_tokens=3)
    assert (out.text, done) == ("text", ["stats", "text"])


def test_sequences_are_as_transformers_returns_them() -> None:
    model = tiny_model("llama")
    out = generate(model, input_ids=torch.tensor([IDS]), max_new_tokens=5)
    assert out.sequences.shape == (1, len(IDS) + 5)
    assert out.sequences.dtype == torch.int64
    assert out.sequences[0, : len(IDS)].tolist() == IDS
    assert out.text is None
    assert out.finish_reason == "length"


def test_text_and_prompt_through_the_tokenizer() -> None:
    model = load_model("demo")
    out = generate(model, "def f(x):\n", policy=StaticPolicy(draft_length=3), max_new_tokens=12)
    assert out.text is not None
    ids = model.tokenizer("def f(x):\n")["input_ids"]
    assert out.sequences[0, : len(ids)].tolist() == ids
    assert model.tokenizer.decode(out.sequences[0, len(ids) :], skip_special_tokens=True) == out.text


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is not valid Unicode"):
        generate(load_model("demo"), "def f\ud800")


def test_one_token_budget_has_no_rates() -> None:
    """Nothing is drafted, and nothing is divided by zero."""
    stats = generate(tiny_model("llama"), input_ids=IDS, policy=RandomPolicy(seed=0), max_new_tokens=1).stats
    assert (stats.tokens, stats.rounds, stats.drafted) == (1, 0, 0)
    assert stats.acceptance_rate is None
    assert stats.tokens_per_second is None


def test_stats_add_up() -> None:
    out = generate(tiny_model("llama"), input_ids=IDS, policy=RandomPolicy(seed=3), max_new_tokens=50)
    stats, rounds = out.stats, out.rounds
    assert stats.rounds == stats.full_passes == len(rounds)
    assert stats.drafted == sum(r.drafted for r in rounds)
    assert stats.accepted == sum(r.accepted for r in rounds)
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert stats.mean_accepted_length == stats.accepted / stats.rounds
    assert stats.mean_draft_length == stats.drafted / sum(r.drafted > 0 for r in rounds)
    layers = [r.exit_layer for r in rounds for _ in range(r.drafted)]
    assert stats.mean_exit_layer == pytest.approx(sum(layers) / len(layers))  # type: ignore[arg-type]
    assert stats.head_reads >= stats.drafted
    seconds = stats.seconds
    assert seconds.total == pytest.approx(sum(stats.to_dict()["seconds"].values()))
    assert set(stats.to_dict()["seconds"]) == set(SECTIONS)
    assert all(value >= 0 for value in stats.to_dict()["seconds"].values())


class Clock:
    """Time that only passes inside a head read of one position, a second each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hf_model: Any) -> None:
        self.now = 0.0
        hf_model.lm_head.register_forward_hook(self._tick)
        monkeypatch.setattr("lede.statistics.time.perf_counter", lambda: self.now)

    def _tick(self, _: Any, args: tuple[torch.Tensor], __: Any) -> None:
        self.now += args[0].shape[1] == 1


@pytest.mark.parametrize("looks", [False, True], ids=["blind", "looking"])
def test_head_reads_are_booked_apart(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the draft nor on features and decisions, whether the policy looks at what was read or not."""
    hf_model = tiny_hf_model("llama")
    model = load_model((hf_model, None))
    Clock(monkeypatch, hf_model)
    policy = ThresholdPolicy(candidates=(1, 3), thresholds=(1.0, 0.0)) if looks else RandomPolicy(seed=0)
    out = generate(model, input_ids=IDS, policy=policy, max_new_tokens=40)
    seconds = out.stats.seconds
    assert seconds.head == out.stats.head_reads > 0
    assert seconds.draft == seconds.inspect == seconds.policy == 0


class Watcher(StaticPolicy):
    """Drafts as the static policy does, looks at nothing, and remembers the trace."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.traces: list[float] = []

    @property
    def uses_trace(self) -> bool:
        return True

    def pre_scan(self, state: PreScanState) -> PreScan | ExitAt:
        self.traces.append(state.trace)
        return super().pre_scan(state)


def test_trace_before_a_round_is_what_the_positions_so_far_were_left_with() -> None:
    """Against transformers' hidden states: the exit layer where it drafted, L elsewhere, nothing past a rejection."""
    model, layer = tiny_model("llama"), 3
    policy = Watcher(exit_layer=layer, draft_length=4)
    out = generate(model, input_ids=IDS, policy=policy, max_new_tokens=40)
    surprisal = -torch.log_softmax(layer_logits(model, out.sequences[0].tolist()), -1).amax(-1)  # (layer, position)
    left: list[float] = []
    wanted: list[float] = []
    for r in out.rounds:
        wanted.append(sum(left[-8:]) / len(left[-8:]) if left else float(surprisal[-1, len(IDS) - 1]))
        start = len(IDS) + len(left)
        at = [layer if i < r.drafted else N_LAYERS for i in range(len(r.tokens))]
        left += [float(surprisal[depth - 1, start + i]) for i, depth in enumerate(at)]
    drafting = [i for i, r in enumerate(out.rounds) if r.drafted]  # the last round may have no room to draft
    assert policy.traces == pytest.approx([wanted[i] for i in drafting], abs=1e-5)
    assert {r.accepted < r.drafted for r in out.rounds} == {True, False}


def count_positions(model: Any) -> tuple[list[Counter[int]], Callable[[], None]]:
    """Which positions went through each layer, and a call that stops counting."""
    seen: list[Counter[int]] = [Counter() for _ in range(model.n_layers)]
    handles = []
    for layer, module in enumerate(model.hf_model.model.layers):

        def hook(_: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
            seen[layer].update(kwargs["position_ids"][0].tolist())

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return seen, stop


@pytest.mark.parametrize(
    "make", [lambda: StaticPolicy(exit_layer=2, draft_length=4), lambda: RandomPolicy(seed=1)], ids=["static", "random"]
)
def test_each_layer_sees_each_position_once_a_round(make: Callable[[], Any]) -> None:
    """The draft's work is used by verification: prompt once, drafted and corrections once, nothing redone."""
    model = load_model((tiny_hf_model("llama"), None))
    seen, stop = count_positions(model)
    out = generate(model, input_ids=IDS, policy=make(), max_new_tokens=40)
    stop()
    # a round runs its newest token, and its drafted ones as far as they were run: rejected positions come again later
    start = len(IDS)
    wanted: list[Counter[int]] = [Counter(range(start)) for _ in range(N_LAYERS)]
    for r in out.rounds:
        rows = 1 + r.drafted
        for layer in range(N_LAYERS):
            wanted[layer].update(range(start, start + rows))
        start += len(r.tokens)
    assert seen == wanted


def test_first_layer_counts_beat_early_exit_that_redoes_its_draft() -> None:
    """Prompt + drafted + corrections in layer 1, as few in the last."""
    model = load_model((tiny_hf_model("llama"), None))
    seen, stop = count_positions(model)
    out = generate(
        model, input_ids=prompt(0, 100), policy=StaticPolicy(exit_layer=2, draft_length=4), max_new_tokens=20
    )
    stop()
    assert sum(seen[0].values()) == 100 + out.stats.rounds + out.stats.drafted
    assert sum(seen[-1].values()) == sum(seen[0].values())


def test_logits_processors_apply_to_draft_and_model() -> None:
    model = tiny_model("llama")
    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    wanted = plain_generate(model, IDS, 40, no_repeat_ngram_size=2)
    assert wanted != plain_generate(model, IDS, 40)
    for policy in (None, StaticPolicy(exit_layer=3, draft_length=4), RandomPolicy(seed=0)):
        out = generate(model, input_ids=IDS, policy=policy, logits_processor=processors, max_new_tokens=40)
        assert out.sequences[0, len(IDS) :].tolist() == wanted


def test_sampling_is_seeded_and_streams_differ() -> None:
    model = tiny_model("llama")

    def draw(**settings: Any) -> list[int]:
        policy = StaticPolicy(exit_layer=3, draft_length=3)
        out = generate(model, input_ids=IDS, policy=policy, max_new_tokens=20, temperature=1.0, **settings)
        return out.sequences[0].tolist()

    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)
    assert draw(seed=1, stream=1) != draw(seed=1)


def test_generation_config_is_understood() -> None:
    model = tiny_model("llama")
    wanted = plain_generate(model, IDS, 9)
    out = generate(model, input_ids=IDS, generation_config=GenerationConfig(max_new_tokens=9))
    assert out.sequences[0, len(IDS) :].tolist() == wanted
    sampled = GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.7, top_k=5)
    out = generate(model, input_ids=IDS, generation_config=sampled, seed=4)
    again = generate(model, input_ids=IDS, max_new_tokens=9, temperature=0.7, top_k=5, seed=4)
    assert torch.equal(out.sequences, again.sequences)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a prompt or input_ids"),
        ({"prompt": "x"}, "no tokenizer"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": torch.ones(1, 2, 2, dtype=torch.long)}, r"one sequence.*\(1, 2, 2\)"),
        ({"input_ids": [1, 1000]}, "the vocabulary has 128"),
        ({"input_ids": [[1, 2], 3]}, "got list"),
        ({"input_ids": [[1, 2], [1, 1000]]}, "the vocabulary has 128"),
        ({"input_ids": BatchEncoding({"input_ids": [[1, 2]]})}, "must be token ids.*got BatchEncoding"),
        ({"input_ids": [1], "attention_mask": 1}, "attention_mask must have the shape of input_ids, got int"),
        ({"input_ids": [1], "seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"input_ids": [1], "eos_token_id": "</s>"}, "eos_token_id must be a token id or several, got '</s>'"),
        ({"input_ids": [1], "eos_token_id": [2.5]}, r"eos_token_id must be a token id or several, got \[2.5\]"),
        ({"input_ids": [1], "temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"input_ids": [1], "temperature": 1, "top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"input_ids": [1], "logits_processor": max}, "logits_processor must be a list, got builtin"),
        ({"input_ids": [1], "stopping_criteria": max}, "stopping_criteria must be a list, got builtin"),
        ({"input_ids": [1], "seed": -1}, "seed and stream must be at least 0, got -1"),
        ({"input_ids": [1], "policy": "static"}, "policy must be a policy or None, got str"),
        ({"input_ids": [1], "max_new_tokens": 2.5}, "must be a whole number"),
        ({"input_ids": [1], "max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"input_ids": [1], "max_new_tokens": 256}, "the prompt has 1 tokens and the budget is 256.*256 positions"),
        ({"input_ids": [1], "temperature": -1}, "temperature must be"),
        ({"input_ids": [1], "top_p": 0.5}, "give a temperature"),
        ({"input_ids": [1], "temperature": 1, "top_p": 1.5}, "top_p must be"),
        ({"input_ids": [1], "beams": 4}, "does not know beams"),
        ({"input_ids": [1], "policy": StaticPolicy(exit_layer=6, draft_length=1)}, r"outside 1\.\.5"),
        ({"input_ids": [1], "generation_config": GenerationConfig(num_beams=4)}, "does not support num_beams=4"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments: dict[str, Any], message: str) -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=message):
        generate(load_model((hf_model, None)), **arguments)


def test_penalties_of_the_models_own_config_are_ignored_aloud() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.generation_config.repetition_penalty = 1.3
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.3"):
        out = generate(load_model((hf_model, None)), input_ids=IDS, max_new_tokens=6)
    assert out.sequences[0, len(IDS) :].tolist() == plain_generate(tiny_model("llama"), IDS, 6)


def test_settings_that_change_nothing_are_neither_refused_nor_warned_about() -> None:
    """Checkpoints and transformers spell defaults out."""
    hf_model = tiny_hf_model("llama")
    own = hf_model.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size, own.min_length = 1.0, 0, 0
    wanted = plain_generate(tiny_model("llama"), IDS, 6)
    model = load_model((hf_model, None))
    for config in (None, own, GenerationConfig(num_beams=1, num_return_sequences=1, output_scores=False)):
        out = generate(model, input_ids=IDS, generation_config=config, max_new_tokens=6)
        assert out.sequences[0, len(IDS) :].tolist() == wanted


def test_policy_of_another_model_is_refused() -> None:
    bound = StaticPolicy(exit_layer=2, draft_length=2).bind(tiny_model("llama"))
    generate(tiny_model("llama"), input_ids=IDS, policy=bound, max_new_tokens=3)
    with pytest.raises(ValueError, match="belongs to model"):
        generate(tiny_model("qwen3"), input_ids=IDS, policy=bound, max_new_tokens=3)


def test_another_temperature_than_the_policys_warns() -> None:
    policy = StaticPolicy(exit_layer=2, draft_length=2, trained_temperature=0.6)
    with pytest.warns(UserWarning, match=r"fitted at temperature 0\.6 and decodes at 0"):
        generate(tiny_model("llama"), input_ids=IDS, policy=policy, max_new_tokens=3)


def test_failing_policy_leaves_the_model_as_it_was() -> None:
    class Broken(StaticPolicy):
        def draft(self, state: Any) -> bool:
            raise RuntimeError("broken")

    model = tiny_model("llama")
    wanted = plain_generate(model, IDS, 12)
    with pytest.raises(RuntimeError, match="broken"):
        generate(model, input_ids=IDS, policy=Broken(exit_layer=2, draft_length=3), max_new_tokens=12)
    assert plain_generate(model, IDS, 12) == wanted
    assert generate(model, input_ids=IDS, max_new_tokens=12).sequences[0, len(IDS) :].tolist() == wanted


class Recorder:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def test_streaming_gives_the_prompt_then_each_round() -> None:
    recorder = Recorder()
    policy = StaticPolicy(exit_layer=3, draft_length=3)
    out = generate(tiny_model("llama"), input_ids=IDS, policy=policy, max_new_tokens=20, streamer=recorder)
    assert recorder.ended
    assert recorder.values[0] == IDS
    assert [len(v) for v in recorder.values[1:]] == [1, *(len(r.tokens) for r in out.rounds)]
    assert [t for v in recorder.values for t in v] == out.sequences[0].tolist()


def test_terminal_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model("demo")
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = generate(model, "import os\n", policy=StaticPolicy(), max_new_tokens=16, streamer=streamer)
    assert capsys.readouterr().out.rstrip("\n") == (out.text or "").rstrip("\n")


def test_learned_policy_without_network_is_refused() -> None:
    with pytest.raises(ValueError, match="network"):
        generate(tiny_model("llama"), input_ids=IDS, policy=LearnedPolicy(), max_new_tokens=3)


def test_public_names() -> None:
    assert set(lede.__all__) <= set(dir(lede))
    for name in lede.__all__:
        assert getattr(lede, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lede.nothing


def test_max_length_gives_way_to_max_new_tokens() -> None:
    both = GenerationConfig(max_length=4096, max_new_tokens=5)
    assert generate(tiny_model("llama"), input_ids=IDS, generation_config=both).stats.tokens == 5
    with pytest.raises(ValueError, match=r"7 tokens and the budget is 4089, together more than the model's 256"):
        generate(tiny_model("llama"), input_ids=IDS, generation_config=GenerationConfig(max_length=4096))


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must come from lede\.load_model, got LlamaForCausalLM"):
        generate(tiny_hf_model("llama"), input_ids=IDS)


def test_an_unknown_answer_of_pre_scan_is_refused() -> None:
    class Odd(StaticPolicy):
        def pre_scan(self, state: Any) -> Any:
            return "lookup"

    with pytest.raises(ValueError, match=r"must answer SKIP, SCAN, ExitAt, SkipSublayers or Lookup, got 'lookup'"):
        generate(tiny_model("llama"), input_ids=IDS, policy=Odd(exit_layer=2, draft_length=3), max_new_tokens=5)
