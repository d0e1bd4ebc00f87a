"""300 random malformed calls: each raises a documented error or behaves like plain `generate()`.

A call may raise only a `SpecError`, before any forward pass, or the error that plain `generate()`
raises for the same settings. An output must equal the plain output.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as T
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_spec import DraftConfig, LookupConfig, SpecError, StrategyConfig, TreeConfig
from hf_spec.common.compat import CACHE_NAME
from tests.model_watch import count_forwards, snapshot
from tests.tiny_models import VOCAB, build, ragged_batch, repetitive_prompt

# Errors that indicate a bug in hf_spec.
INTERNAL = (IndexError, KeyError, AttributeError, RuntimeError, AssertionError)

PROMPT = repetitive_prompt()
BATCH = ragged_batch()

# (name, function that makes the value), so that examples share nothing.
Part = tuple[str, Any]


@cache
def other_vocabulary() -> T.PreTrainedModel:
    config = T.LlamaConfig(
        vocab_size=VOCAB + 200,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return T.LlamaForCausalLM(config).eval()


@cache
def encoder_decoder() -> T.PreTrainedModel:
    config = T.T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return T.T5ForConditionalGeneration(config).eval()


def bans_newest(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def stops_at_25(input_ids: Tensor, scores: Any) -> bool:
    return input_ids.shape[1] >= 25


class Streamer:
    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def filled_cache(rows: int = 1) -> DynamicCache:
    cache = DynamicCache(config=build("llama").config)
    build("llama")(PROMPT[:, :6].repeat(rows, 1), **{CACHE_NAME: cache}, use_cache=True)
    return cache


NUMBERS = [-1, 0, 1, 2, 10**9, 10**30, 2.5, float("nan"), float("inf"), True, "3", None, [1]]
OPTION_NAMES = {
    "lookup": [
        "match_length",
        "min_match_length",
        "copy_length",
        "max_matches",
        "max_draft_tokens",
    ],
    "draft": ["max_draft_tokens", "length_policy", "confidence_threshold", "sample_drafts"],
    "disco": ["max_draft_tokens", "min_draft_tokens", "acceptance_threshold", "length_policy"],
    "tree": ["children", "expanded_per_level", "max_nodes", "min_probability", "min_sibling_ratio"],
    "falcon": ["tree", "max_draft_tokens", "min_draft_tokens", "length_policy"],
    "gsd": [
        "merge_length",
        "children",
        "max_draft_tokens",
        "sample_drafts",
        "max_draft_nodes",
        "lossy",
    ],
}


@st.composite
def strategy_dicts(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(OPTION_NAMES)))
    options = draw(
        st.dictionaries(
            st.sampled_from([*OPTION_NAMES[name], "no_such_option"]),
            st.sampled_from(NUMBERS),
            max_size=2,
        )
    )
    return {"strategy": name, **options}


SPEC_STRATEGIES = st.one_of(
    st.sampled_from(
        ["lookup", "draft", "tree", "gsd", "disco", "falcon", "", "no-such", b"lookup"]
    ),
    st.sampled_from([LookupConfig(), DraftConfig(), TreeConfig(), StrategyConfig(), LookupConfig]),
    st.sampled_from([0, 1, False, 2.5, (), ["lookup"], {}]),
    strategy_dicts(),
)

ASSISTANTS = st.sampled_from(
    [
        lambda: None,
        lambda: 3,
        lambda: "",
        lambda: "/no/such/folder",
        object,
        lambda: build("llama").config,
        lambda: T.LlamaForCausalLM,
        lambda: torch.nn.Linear(2, 2),
        other_vocabulary,
        encoder_decoder,
        lambda: build("qwen2"),
        lambda: build("llama", 1),
        lambda: build("llama"),
    ]
)

# Most calls have a valid strategy; otherwise their other arguments would not be checked.
WORKING: list[tuple[Any, Any]] = [
    ("lookup", lambda: None),
    (LookupConfig(max_matches=4), lambda: None),
    ("draft", lambda: build("llama", 1)),
    (TreeConfig(children=2), lambda: build("llama")),
]

PROMPTS: list[dict[str, Any]] = [
    {"input_ids": PROMPT},
    {"inputs": PROMPT},
    dict(BATCH),
    {},
    {"input_ids": None},
    {"input_ids": PROMPT[0]},
    {"input_ids": PROMPT[:, :1]},
    {"input_ids": PROMPT[:, :0]},
    {"input_ids": PROMPT[:0]},
    {"input_ids": PROMPT.float()},
    {"input_ids": PROMPT.int()},
    {"input_ids": PROMPT.bool()},
    {"input_ids": PROMPT.tolist()},
    {"input_ids": PROMPT[None]},
    {"input_ids": PROMPT + VOCAB},
    {"input_ids": PROMPT - 30},
    {"input_ids": "a prompt"},
    {"input_ids": PROMPT, "inputs": PROMPT},
    {name: tensor.flip(1) for name, tensor in BATCH.items()},
    {"input_ids": BATCH["input_ids"], "pad_token_id": 0},
    {"input_ids": BATCH["input_ids"].flip(1), "pad_token_id": 0},
    {"inputs_embeds": torch.zeros(1, 3, 32)},
]

EXTRAS = st.sampled_from(
    [
        ("attention_mask", lambda: torch.ones(1, 21, dtype=torch.long)),
        ("attention_mask", lambda: torch.zeros(1, 21, dtype=torch.long)),
        ("attention_mask", lambda: torch.ones(21, dtype=torch.long)),
        ("attention_mask", lambda: torch.ones(1, 9, dtype=torch.long)),
        ("attention_mask", lambda: torch.ones(1, 1, 21, 21)),
        ("attention_mask", lambda: torch.full((1, 21), 3)),
        ("attention_mask", lambda: torch.tensor([[1, 1, 0] * 6 + [1, 1, 1]])),
        ("attention_mask", lambda: "all"),
        ("position_ids", lambda: torch.arange(21)[None]),
        ("position_ids", lambda: torch.arange(21)[None] * 2),
        ("position_ids", lambda: torch.arange(3)),
        ("token_type_ids", lambda: torch.zeros(1, 21, dtype=torch.long)),
        ("no_such_argument", lambda: 1),
        ("num_beams", lambda: 4),
        ("num_beams", lambda: "4"),
        ("penalty_alpha", lambda: 0.6),
        ("dola_layers", lambda: "high"),
        ("use_cache", lambda: False),
        ("cache_implementation", lambda: "static"),
        ("cache_implementation", lambda: "no-such"),
        ("cache_implementation", lambda: ["static"]),
        (CACHE_NAME, lambda: StaticCache(config=build("llama").config, max_cache_len=64)),
        (CACHE_NAME, filled_cache),
        (CACHE_NAME, lambda: filled_cache(2)),
        (CACHE_NAME, lambda: DynamicCache(config=build("llama").config)),
        (CACHE_NAME, lambda: 7),
        ("max_new_tokens", lambda: -3),
        ("max_new_tokens", lambda: 0),
        ("max_new_tokens", lambda: 1),
        ("max_new_tokens", lambda: 2.5),
        ("max_new_tokens", lambda: "five"),
        ("max_length", lambda: 4),
        ("min_new_tokens", lambda: 50),
        ("max_time", lambda: 0.0),
        ("eos_token_id", lambda: -5),
        ("eos_token_id", lambda: [25, 25, 10**6]),
        ("eos_token_id", lambda: "w2"),
        ("pad_token_id", lambda: None),
        ("output_attentions", lambda: True),
        ("output_hidden_states", lambda: True),
        ("return_dict_in_generate", lambda: True),
        ("output_scores", lambda: True),
        ("num_return_sequences", lambda: 3),
        ("num_return_sequences", lambda: 0),
        ("temperature", lambda: 0.5),
        ("repetition_penalty", lambda: -1.0),
        ("repetition_penalty", lambda: 1.4),
        ("no_repeat_ngram_size", lambda: 2),
        ("bad_words_ids", lambda: [[]]),
        ("bad_words_ids", lambda: [[25], [76, 25]]),
        ("sequence_bias", lambda: {"a": 1}),
        ("suppress_tokens", lambda: [10**6]),
        ("forced_eos_token_id", lambda: 5),
        ("guidance_scale", lambda: 1.7),
        ("guidance_scale", lambda: 1.0),
        ("token_healing", lambda: True),
        ("prompt_lookup_num_tokens", lambda: 3),
        ("stop_strings", lambda: ["a"]),
        ("synced_gpus", lambda: True),
        ("custom_generate", lambda: "/no/such/folder"),
        ("generation_config", lambda: {"top_k": 3}),
        ("generation_config", lambda: GenerationConfig(max_new_tokens=4, num_beams=3)),
        ("generation_config", lambda: GenerationConfig(max_new_tokens=4, repetition_penalty=1.2)),
        ("logits_processor", lambda: [bans_newest]),
        ("logits_processor", lambda: [3]),
        ("logits_processor", lambda: bans_newest),
        ("logits_processor", lambda: [lambda ids: ids]),
        ("stopping_criteria", lambda: [stops_at_25]),
        ("stopping_criteria", lambda: [None]),
        ("prefix_allowed_tokens_fn", lambda: lambda row, ids: [int(ids[-1]) + 1, 5]),
        ("prefix_allowed_tokens_fn", lambda: lambda row, ids: []),
        ("prefix_allowed_tokens_fn", lambda: "all"),
        ("streamer", Streamer),
        ("streamer", lambda: "stdout"),
        ("negative_prompt_ids", lambda: PROMPT),
        ("assistant_model", lambda: build("llama")),
        ("do_sample", lambda: "yes"),
        ("do_sample", lambda: True),
    ]
)


def outcome(call: dict[str, Any]) -> Any:
    """Return the sequences, or the error."""
    model = build("llama")
    try:
        result = model.generate(**call)
    except Exception as error:  # noqa: BLE001 - any kind is compared
        return error
    return result if isinstance(result, Tensor) else result.sequences


@settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.sampled_from(PROMPTS + 15 * PROMPTS[:3]),
    st.sampled_from(WORKING) | st.tuples(SPEC_STRATEGIES, ASSISTANTS),
    st.lists(EXTRAS, max_size=2),
)
def test_malformed_calls(
    prompt: dict[str, Any], strategy: tuple[Any, Any], extras: list[Part]
) -> None:
    def make() -> dict[str, Any]:
        # With one token to choose from, sampling is deterministic and can be compared.
        odd = {name: value() for name, value in extras}
        return {"max_new_tokens": 6, "top_k": 1, **prompt, **odd}

    model = build("llama")
    before = snapshot(model)
    call = {**make(), "spec_strategy": strategy[0], "assistant": strategy[1]()}
    with count_forwards(model) as forwards:
        drafted = outcome(call)
    assert snapshot(model) == before
    if isinstance(drafted, SpecError):
        event("refused")
        assert forwards == []
        assert len(str(drafted)) > 20
        return
    plain = outcome(make())
    if isinstance(drafted, Exception):
        event(f"plain error {drafted!r:.160}")
        assert type(drafted) is type(plain), (drafted, plain)
        assert not isinstance(drafted, INTERNAL), drafted
    else:
        event("served")
        assert isinstance(plain, Tensor), plain
        assert torch.equal(drafted, plain), (drafted, plain)
