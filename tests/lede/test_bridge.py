"""transformers' own `generate` with `custom_generate`: its settings, its outputs, its texts."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StaticCache,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

import lede
from lede.bridged_model import bridged_model
from lede.models import load_model
from lede.phrases import PhraseMemory
from lede.policies import LookupPolicy, StaticPolicy
from tests.deciding_policies import KINDS, policy_of
from tests.naive_phrases import NaivePhrases, proposal_with_memory
from tests.stop_at import StopAt
from tests.tiny_models import prompt, tiny_hf_model, tiny_model

IDS = torch.tensor([prompt(0, 7)])
ROWS = [prompt(0, 4), prompt(1, 9), prompt(2, 6)]


def static(**arguments: Any) -> Any:
    return lede.custom_generate(StaticPolicy(exit_layer=3, draft_length=4), **arguments)


def padded() -> dict[str, torch.Tensor]:
    longest = max(map(len, ROWS))
    return {
        "input_ids": torch.tensor([[1] * (longest - len(row)) + row for row in ROWS]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ROWS]),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 24},
    "penalties": {"max_new_tokens": 24, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]]},
    "ends": {"max_new_tokens": 24, "eos_token_id": [30, 7], "pad_token_id": 0, "min_new_tokens": 5},
    "length": {"max_length": 20},
    "first token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a4_4_generate_gives_its_own_text_faster(family: str, name: str) -> None:
    hf_model, settings = tiny_model(family).hf_model, SETTINGS[name]
    wanted = hf_model.generate(IDS, **settings)
    for kind in KINDS if family == "llama" else ("static", "learned"):
        found = hf_model.generate(IDS, custom_generate=lede.custom_generate(policy_of(kind)), **settings)
        assert torch.equal(found, wanted), kind


def nearly(tokens: list[int]) -> list[int]:
    """Another token in every fifth place, so that drafts go wrong somewhere."""
    return [token if n % 5 else token // 2 for n, token in enumerate(tokens, 1)]


@pytest.mark.parametrize("remembers", [False, True], ids=["text alone", "memory"])
@pytest.mark.parametrize("rows", [1, 3])
def test_lookups_draft_in_generate(rows: int, remembers: bool) -> None:
    """Every round against an account of its own: what a naive search proposes there, held against the plain text."""
    hf_model, n_new = tiny_hf_model("llama"), 40
    settings = {"max_new_tokens": n_new, "pad_token_id": 0}
    inputs = padded() if rows > 1 else {"input_ids": IDS}
    prompts = ROWS if rows > 1 else IDS.tolist()
    wanted = hf_model.generate(**inputs, **settings)
    texts = [[*ids, *row[-n_new:]] for ids, row in zip(prompts, wanted.tolist(), strict=True)]
    known = [(ids, nearly(text[len(ids) :])) for ids, text in zip(prompts, texts, strict=True)]
    policy, naive = LookupPolicy(draft_length=6), NaivePhrases(known if remembers else [], 4)
    policy.memory = PhraseMemory.from_texts(known, 4) if remembers else None
    custom, by_memory = lede.custom_generate(policy), []
    assert torch.equal(hf_model.generate(**inputs, custom_generate=custom, **settings), wanted)
    for ids, text, out in zip(prompts, texts, custom.outputs, strict=True):
        at, account = len(ids) + 1, []
        while at < len(text):
            room = min(policy.plan.length, len(text) - at - 1)
            copied, remembered = proposal_with_memory(text[:at], policy.lookup, naive, room)
            right = next((i for i, token in enumerate(copied) if token != text[at + i]), len(copied))
            account.append(("lookup" if copied else None, len(copied), right))
            by_memory += [remembered] if right else []
            at += right + 1
        assert [(r.source, r.drafted, r.accepted) for r in out.rounds] == account
        assert sum(accepted for *_, accepted in account) > 0
        assert out.stats.head_reads == 0
    assert any(by_memory) == remembers


def test_generation_configs_and_own_processors_and_criteria() -> None:
    hf_model = tiny_model("llama").hf_model
    text = hf_model.generate(IDS, max_new_tokens=12, no_repeat_ngram_size=2)[0, IDS.shape[1] :].tolist()

    def arguments() -> dict[str, Any]:
        return {
            "generation_config": GenerationConfig(max_new_tokens=12, repetition_penalty=1.05),
            "logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]),
            "stopping_criteria": StoppingCriteriaList([StopAt(text[7])]),
            "prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(128) if t != (len(ids) + row) % 128],
        }

    wanted = hf_model.generate(IDS, **arguments())
    custom = static()
    assert torch.equal(hf_model.generate(IDS, custom_generate=custom, **arguments()), wanted)
    (out,) = custom.outputs
    assert out.stats.tokens == wanted.shape[1] - IDS.shape[1] == 1 + sum(len(r.tokens) for r in out.rounds)


def test_the_models_own_generation_config_acts_here() -> None:
    """transformers merged it before; `lede.generate` leaves it out, and says so."""
    hf_model = tiny_hf_model("llama")
    hf_model.generation_config.repetition_penalty = 1.4
    hf_model.generation_config.eos_token_id = 77
    wanted = hf_model.generate(IDS, max_new_tokens=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(hf_model.generate(IDS, max_new_tokens=20, custom_generate=static()), wanted)
    assert not torch.equal(wanted, tiny_model("llama").hf_model.generate(IDS, max_new_tokens=20))


@pytest.mark.parametrize("rows", [1, 3])
def test_outputs_are_those_of_transformers(rows: int) -> None:
    hf_model = tiny_hf_model("llama")
    inputs = padded() if rows > 1 else {"input_ids": IDS}
    settings = {
        **{"max_new_tokens": 14, "repetition_penalty": 1.2, "return_dict_in_generate": True},
        **{"output_scores": True, "output_logits": True},
    }
    wanted = hf_model.generate(**inputs, **settings)
    found = hf_model.generate(**inputs, custom_generate=static(), **settings)
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert found.scores is not None
    assert found.logits is not None
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(found.scores) == len(found.logits) == 14
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(wanted.scores))
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits))
    bare = hf_model.generate(**inputs, custom_generate=static(), max_new_tokens=3, return_dict_in_generate=True)
    assert (bare.scores, bare.logits) == (None, None)
    assert isinstance(hf_model.generate(**inputs, custom_generate=static(), max_new_tokens=3), torch.Tensor)


BATCHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths count padding": {"min_new_tokens": 6, "begin_suppress_tokens": [125, 23, 9], "forced_eos_token_id": 3},
    "penalties": {"repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 2},
    "by row": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(40 * row, 40 * row + 40))},
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_left_padded_batch_is_filled_up_behind_its_ends(name: str) -> None:
    hf_model = tiny_hf_model("llama")
    settings = {"max_new_tokens": 16, "eos_token_id": [125, 30, 44, 90], "pad_token_id": 2, **BATCHED[name]}
    wanted = hf_model.generate(**padded(), **settings)
    custom = lede.custom_generate(policy_of("static"))
    found = hf_model.generate(**padded(), custom_generate=custom, **settings)
    assert torch.equal(found, wanted)
    assert len(custom.outputs) == 3
    for row, out in zip(ROWS, custom.outputs, strict=True):
        assert out.sequences[0, : len(row)].tolist() == row


def test_a4_8_right_padding_is_refused_in_generate() -> None:
    inputs = {name: value.flip(1) for name, value in padded().items()}
    with pytest.raises(ValueError, match="padded on the right"):
        tiny_hf_model("llama").generate(**inputs, custom_generate=static(), max_new_tokens=3)


def test_rows_that_end_early_need_a_pad_token() -> None:
    stop = StoppingCriteriaList([StopAt(3)])
    with pytest.raises(ValueError, match="no pad_token_id"):
        tiny_hf_model("llama").generate(**padded(), custom_generate=static(), stopping_criteria=stop, max_new_tokens=3)


def test_a4_4_streamer_and_stop_strings_through_the_public_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model("demo")
    inputs = model.tokenizer("def merge_sort(items):\n", return_tensors="pt")
    own = {"pad_token_id": 0, "max_new_tokens": 40}
    stop = model.tokenizer.decode(model.hf_model.generate(**inputs, **own)[0, -9:])[2:6]
    wanted = model.hf_model.generate(**inputs, stop_strings=[stop], tokenizer=model.tokenizer, **own)
    assert wanted.shape[1] < inputs["input_ids"].shape[1] + 40
    streamer = TextStreamer(model.tokenizer, skip_prompt=True)
    custom = static(tokenizer=model.tokenizer, streamer=streamer, stop_strings=stop)
    capsys.readouterr()
    found = model.hf_model.generate(**inputs, custom_generate=custom, **own)
    assert torch.equal(found, wanted)
    assert custom.outputs[0].finish_reason == "stop"
    text = model.tokenizer.decode(wanted[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out == text + "\n"


def test_stop_strings_need_a_tokenizer_at_once() -> None:
    with pytest.raises(ValueError, match="give tokenizer as well"):
        static(stop_strings="x")
    with pytest.raises(ValueError, match="policy must be a policy or None, got str"):
        lede.custom_generate("static")  # type: ignore[arg-type]


def test_sampling_is_seeded_by_a_keyword_or_by_torch() -> None:
    hf_model = tiny_hf_model("llama")

    def draw(**arguments: Any) -> list[int]:
        settings = {"do_sample": True, "min_p": 0.2, "temperature": 0.9, "max_new_tokens": 12}
        found: list[int] = hf_model.generate(IDS, custom_generate=static(), **settings, **arguments)[0].tolist()
        return found

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second = draw(), draw()
        torch.manual_seed(5)
        assert draw() == first != second


def test_max_time_acts() -> None:
    out = static()
    found = tiny_hf_model("llama").generate(IDS, custom_generate=out, max_new_tokens=200, max_time=1e-9)
    assert found.shape[1] == IDS.shape[1] + 1
    assert out.outputs[0].finish_reason == "time"


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 3},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 2},
    "cache_implementation": {"cache_implementation": "static"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 7, 32, dtype=torch.float64)},
    "position_ids": {"position_ids": torch.arange(3, 10)[None]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name_before_any_work(name: str) -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers has its own doubts about some of these
        with pytest.raises(ValueError, match=name):
            hf_model.generate(IDS, custom_generate=static(), max_new_tokens=3, **REFUSED[name])


def test_caches_of_the_callers_are_refused() -> None:
    hf_model = tiny_hf_model("llama")
    with torch.no_grad():
        filled = hf_model(IDS[:, :3]).past_key_values
    for cache in (filled, StaticCache(hf_model.config, max_cache_len=32)):
        with pytest.raises(ValueError, match="a cache of its own"):
            static()(
                hf_model,
                IDS,
                logits_processor=LogitsProcessorList(),
                stopping_criteria=StoppingCriteriaList(),
                generation_config=GenerationConfig(max_length=9),
                past_key_values=cache,
            )
    assert isinstance(filled, DynamicCache)


def test_a_model_is_wrapped_once() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.generate(IDS, custom_generate=static(), max_new_tokens=3)
    wrapped = bridged_model(hf_model)
    assert bridged_model(hf_model) is wrapped
    other = copy.deepcopy(hf_model)
    assert bridged_model(other).hf_model is other


def test_a_wrapped_model_is_let_go() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.generate(IDS, custom_generate=static(), max_new_tokens=3)
    gone = weakref.ref(hf_model)
    del hf_model
    gc.collect()
    assert gone() is None


def test_a_changed_model_is_wrapped_anew() -> None:
    hf_model = tiny_hf_model("llama")
    hf_model.generate(IDS, custom_generate=static(), max_new_tokens=3)
    hf_model.lm_head = torch.nn.Linear(32, 128, bias=False, dtype=torch.float64)
    wanted = hf_model.generate(IDS, max_new_tokens=12)
    assert torch.equal(hf_model.generate(IDS, custom_generate=static(), max_new_tokens=12), wanted)


def test_unsupported_models_and_other_models_policies_are_refused() -> None:
    bound = StaticPolicy(exit_layer=2, draft_length=2).bind(tiny_model("qwen3"))
    with pytest.raises(ValueError, match="belongs to model"):
        tiny_hf_model("llama").generate(IDS, custom_generate=lede.custom_generate(bound), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"outside 1\.\.5"):
        tiny_hf_model("llama").generate(
            IDS, custom_generate=lede.custom_generate(StaticPolicy(exit_layer=6)), max_new_tokens=3
        )


def test_a_copied_model_asks_nothing_of_the_one_it_came_from() -> None:
    hf_model = tiny_hf_model("llama")
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
    hf_model.generate(IDS, custom_generate=static(), **settings)
    other = copy.deepcopy(hf_model)
    other.set_attn_implementation("eager")
    found = other.generate(IDS, custom_generate=static(), **settings)
    assert torch.equal(found, other.generate(IDS, **settings))
    assert pickle.loads(pickle.dumps(hf_model)).config.model_type == "llama"


def test_a_row_of_padding_alone_is_refused() -> None:
    mask = torch.tensor([[1] * 7, [0] * 7])
    with pytest.raises(ValueError, match="row 1 of input_ids is all padding"):
        tiny_hf_model("llama").generate(
            IDS.repeat(2, 1), attention_mask=mask, max_new_tokens=4, pad_token_id=0, custom_generate=static()
        )
