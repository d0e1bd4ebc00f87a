"""Tiny random models of many architectures, float32, with a vocabulary of 97 tokens.

Also the prompts, the tokenizer and the strategies that the tests share.
"""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import transformers as T
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_spec
from hf_spec.adapters.folder import BaseModel, SpecAdapter, save_adapter
from hf_spec.engine.forward.tree_attention import takes_packed
from hf_spec.methods.disco.classifier import DiscoClassifier
from hf_spec.methods.sdsat.adaptive_tokens import AdaptiveShape, AdaptiveTokens
from hf_spec.methods.sdsat.gated_lora import new_lora

VOCAB = 97
WINDOW = 8
# Device of the models and prompts, for example "cuda" to run a file of tests on a GPU.
DEVICE = torch.device(os.environ.get("HF_SPEC_TEST_DEVICE", "cpu"))

LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_GPT_LIKE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
}
_SLIDING_MIX = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


def _configs() -> dict[str, PreTrainedConfig]:
    base = LLAMA_LIKE
    return {
        "llama": T.LlamaConfig(**base),
        "qwen2": T.Qwen2Config(**base),
        "qwen2_sliding": T.Qwen2Config(
            **base, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        ),
        "qwen3": T.Qwen3Config(**base, head_dim=8),
        "mistral": T.MistralConfig(**base, sliding_window=None),
        "mistral_sliding": T.MistralConfig(**base, sliding_window=WINDOW),
        "gemma": T.GemmaConfig(**base, head_dim=8),
        "gemma2": T.Gemma2Config(
            **base, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8
        ),
        "gemma3": T.Gemma3TextConfig(**base, **_SLIDING_MIX, query_pre_attn_scalar=8),
        "phi3": T.Phi3Config(**base),
        "opt": T.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=32,
            pad_token_id=0,
            init_std=0.3,
        ),
        "gpt2": T.GPT2Config(**_GPT_LIKE),
        "gpt_neox": T.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            initializer_range=0.3,
        ),
        "gpt_bigcode_mqa": T.GPTBigCodeConfig(**_GPT_LIKE, multi_query=True),
        "gpt_bigcode_mha": T.GPTBigCodeConfig(**_GPT_LIKE, multi_query=False),
        "starcoder2": T.Starcoder2Config(**base, sliding_window=None),
        "falcon_gqa": T.FalconConfig(
            **_FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
            alibi=False,
            bias=False,
            parallel_attn=True,
        ),
        "falcon_mqa": T.FalconConfig(
            **_FALCON,
            new_decoder_architecture=False,
            multi_query=True,
            alibi=False,
            bias=False,
            parallel_attn=True,
        ),
        "falcon_alibi": T.FalconConfig(
            **_FALCON,
            new_decoder_architecture=False,
            multi_query=False,
            alibi=True,
            bias=True,
            parallel_attn=False,
        ),
        "bloom": T.BloomConfig(
            vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, initializer_range=0.3
        ),
        "gpt_oss": T.GptOssConfig(**base, **_SLIDING_MIX, **_EXPERTS),
        "olmo2": T.Olmo2Config(**base),
        "olmo3": T.Olmo3Config(
            **base, sliding_window=WINDOW, layer_types=_SLIDING_MIX["layer_types"]
        ),
        "llama4": T.Llama4TextConfig(
            **base,
            **_EXPERTS,
            head_dim=8,
            intermediate_size_mlp=64,
            attention_chunk_size=2 * WINDOW,
            # The second layer has no rotary positions, and scales its queries by position.
            no_rope_layers=[1, 0, 1],
            floor_scale=4,
            attn_scale=0.5,
        ),
        "glm": T.GlmConfig(**base, head_dim=8),
        "glm4": T.Glm4Config(**base, head_dim=8),
        "cohere": T.CohereConfig(**base),
        "cohere2": T.Cohere2Config(**base, **_SLIDING_MIX),
        "granite": T.GraniteConfig(**base),
        "smollm3": T.SmolLM3Config(**base),
        "exaone4": T.Exaone4Config(**base, **_SLIDING_MIX),
        "mixtral": T.MixtralConfig(**base, **_EXPERTS, sliding_window=WINDOW),
        "qwen3_moe": T.Qwen3MoeConfig(
            **base, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
        "deepseek_v3": T.DeepseekV3Config(
            **{**base, "num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=32,
        ),
        "phi": T.PhiConfig(**base),
        "stablelm": T.StableLmConfig(**base),
        "nemotron": T.NemotronConfig(**base),
        "diffllama": T.DiffLlamaConfig(**base),
        "persimmon": T.PersimmonConfig(**base),
        "gptj": T.GPTJConfig(**_GPT_LIKE, rotary_dim=4),
        "codegen": T.CodeGenConfig(**_GPT_LIKE, rotary_dim=4),
        "xglm": T.XGLMConfig(
            vocab_size=VOCAB,
            d_model=32,
            ffn_dim=64,
            num_layers=3,
            attention_heads=4,
            max_position_embeddings=256,
            init_std=0.3,
        ),
    }


ARCHITECTURES = sorted(_configs())


# Models made by functions that are `shared`.
SHARED: list[PreTrainedModel] = []


def shared(make: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """Cache each model for all tests of a process, which must leave it unchanged."""

    @cache
    @wraps(make)
    def made(*args: Any, **options: Any) -> PreTrainedModel:
        SHARED.append(make(*args, **options))
        return SHARED[-1]

    return made


@shared
def build(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model of the named architecture, cached per session; do not change it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_configs()[name]).eval()
    with torch.no_grad():
        # Norms and biases start as ones and zeros, which would hide mistakes.
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.to(DEVICE)


def repetitive_prompt(length: int = 21, period: int = 7, seed: int = 1) -> torch.Tensor:
    """Return a (1, length) int64 prompt in which lookup finds matches."""
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randint(3, VOCAB, (1, period), generator=generator)
    return pattern.repeat(1, length // period + 1)[:, :length].to(DEVICE)


@cache
def settled_prompt(name: str, length: int = 36) -> Tensor:
    """Return the repetitive prompt and its continuation by the model, (1, 21 + length) int64.

    Random models fall into loops after a while, in which lookup finds matches.
    """
    model = build(name)
    return model.generate(repetitive_prompt(), max_new_tokens=length, do_sample=False)


def prompts(name: str, kind: str) -> dict[str, Tensor]:
    """Return the inputs of a test: `one` sequence or a left-padded `ragged` batch of five."""
    settled = settled_prompt(name)
    if kind == "one":
        return {"input_ids": settled}
    rows = [settled[0], settled[0, :-8]]
    batch = ragged_batch((5, 11, 3))
    rows += [ids[mask.bool()] for ids, mask in zip(*batch.values(), strict=True)]
    return left_padded(rows)


# Timings of a machine on which drafts are nearly free.
TIMINGS = {"verify": [[1, 1.0], [64, 1.1]], "draft": {"tree": [[1, 0.001]]}}


def _falcon(name: str) -> dict[str, Any]:
    from tests.falcon_reference import random_head

    config = hf_spec.FalconConfig(tree=wide_tree())
    return {"spec_strategy": config, "assistant": random_head(name)}


def _gemma_assistant(name: str) -> dict[str, Any]:
    from tests.gemma_reference import random_assistant

    config = hf_spec.GemmaAssistantConfig(**wide_beam())
    return {"spec_strategy": config, "assistant": random_assistant(name)}


def _mtp(name: str) -> dict[str, Any]:
    from tests.mtp_reference import random_mtp_head

    config = hf_spec.MtpConfig(**wide_beam())
    return {"spec_strategy": config, "assistant": random_mtp_head(name)}


def _sdsat(name: str) -> dict[str, Any]:
    config = hf_spec.SdsatConfig(tree=wide_tree())
    return {"spec_strategy": config, "assistant": sdsat_adapter(name)}


def _eagle(name: str) -> dict[str, Any]:
    from tests.published_heads import sample

    # Two thirds of the vocabulary are drafted, so that a random head is sometimes right.
    config = hf_spec.EagleConfig(width=64, max_draft_tokens=1, max_nodes=64)
    return {"spec_strategy": config, "assistant": sample("every token").folder}


def _block(name: str) -> dict[str, Any]:
    from tests.feature_reference import deepspec

    return {
        "spec_strategy": hf_spec.BlockConfig(tree=every_token()),
        "assistant": deepspec("gated"),
    }


def _heads(name: str) -> dict[str, Any]:
    from tests.feature_reference import medusa

    return {"spec_strategy": hf_spec.HeadsConfig(tree=every_token()), "assistant": medusa()}


def _auto(name: str) -> dict[str, Any]:
    config = hf_spec.AutoConfig(timings=TIMINGS)
    return {"spec_strategy": config, "assistant": draft_model(name)}


# Strategy -> function from a model's name to the arguments of `generate()`.
_ROWS: dict[str, Callable[[str], dict[str, Any]]] = {
    "none": lambda name: {"spec_strategy": "none"},
    "lookup": lambda name: {"spec_strategy": "lookup"},
    "draft": lambda name: {"spec_strategy": "draft", "assistant": draft_model(name)},
    "tree": lambda name: {"spec_strategy": "tree", "assistant": draft_model(name)},
    "gsd": lambda name: {"spec_strategy": "gsd", "assistant": draft_model(name)},
    "disco": lambda name: {"spec_strategy": "disco", "assistant": disco_adapter(name)},
    "eagle": _eagle,
    "pard": lambda name: {"spec_strategy": "pard", "assistant": pard_model(name)},
    "falcon": _falcon,
    "gemma_assistant": _gemma_assistant,
    "mtp": _mtp,
    "sdsat": _sdsat,
    "block": _block,
    "heads": _heads,
    "auto": _auto,
}
STRATEGIES = tuple(_ROWS)
# Strategies that differ from others only in the drafter, with the models that they are tested on.
# The large tests of the engine skip them.
PUBLISHED = {
    "eagle": ("gemma3", "llama", "bloom", "gpt_oss"),
    "block": ("gemma3", "llama", "bloom", "gpt_oss"),
    "heads": ("gemma3", "llama", "bloom", "gpt_oss"),
    "pard": ("gemma3", "llama"),
    "gemma_assistant": ("gemma3", "llama"),
    "mtp": ("gemma3", "llama"),
}
MATRIX = tuple(name for name in STRATEGIES if name not in PUBLISHED)


def speculation(name: str, strategy: str) -> dict[str, Any]:
    """Return keyword arguments that make `generate()` of the named model use a strategy."""
    return _ROWS[strategy](name)


def wide_beam() -> dict[str, Any]:
    """Return options of a tree with every token, so that a random drafter is always right."""
    return {"tree": "dynamic", "width": VOCAB, "max_draft_tokens": 1, "max_nodes": VOCAB}


@cache
def wide_tree() -> list[tuple[int, ...]]:
    """Return rank paths for random heads: every first token and some paths over two passes."""
    first = [(rank,) for rank in range(VOCAB)]
    second = [(rank, below) for rank in range(0, VOCAB, 8) for below in range(8)]
    third = [(*path, rank) for path in second if path[1] == 0 for rank in range(2)]
    return [*first, *second, *third]


def every_token() -> list[tuple[int, ...]]:
    """Return rank paths for random heads with one ranking per level: every first token."""
    return [*((rank,) for rank in range(VOCAB)), (0, 0), (0, 1), (1, 0)]


@cache
def sdsat_adapter(name: str) -> SpecAdapter:
    """Return random adaptive tokens with a gated LoRA for the named model."""
    return random_adaptive_tokens(build(name))


def random_adaptive_tokens(
    model: PreTrainedModel, mode: str = "gated", diverse: bool = False, window: int = 5
) -> SpecAdapter:
    """Return an SDSAT adapter whose LoRA, if its mode has one, changes the output a lot."""
    torch.manual_seed(3)
    embedding: Any = model.get_input_embeddings()
    vectors = torch.randn(window if diverse else 1, embedding.weight.shape[1]) * 0.3
    lora = {} if mode == "embeddings" else new_lora(model, rank=2)
    for _, up in lora.values():
        up.data.normal_(0, 0.2)
    tokens = AdaptiveTokens(AdaptiveShape(mode, diverse, window), vectors, lora)
    return tokens.to_adapter(BaseModel.of(model), {"num_adaptive": 3})


@cache
def draft_model(name: str, num_layers: int = 2) -> PreTrainedModel:
    """Return the first layers of the named model, cached per session."""
    return hf_spec.truncated_draft(build(name), num_layers)


@cache
def pard_model(name: str) -> PreTrainedModel:
    """Return the first layers of the named model as a model that drafts after mask tokens."""
    model = hf_spec.truncated_draft(build(name), 2)
    model.config.get_text_config().pard_token = VOCAB - 1
    return model


@cache
def padded(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """Return a copy of a model with an embedding of `rows` rows, more or fewer than it has."""
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return model.eval()


@cache
def disco_adapter(name: str) -> str:
    """Return the folder of an untrained DISCO classifier for a model and its first two layers."""
    folder = tempfile.mkdtemp(prefix="disco_adapter_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_disco_adapter(folder, build(name))
    return folder


def save_disco_adapter(folder: Any, model: PreTrainedModel, **options: Any) -> None:
    """Write a random DISCO classifier that sometimes continues and sometimes stops."""
    torch.manual_seed(11)
    classifier = DiscoClassifier()
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    # Its predictions for the random models are close to this threshold.
    options = {"threshold": 0.42, "max_draft_tokens": 5, "draft": {"truncated": 2}, **options}
    save_adapter(folder, classifier.to_adapter(BaseModel.of(model), **options))


SYLLABLES = Regex("abcdef|[bcdfghjklmnpqrstvwxz][aeiou]")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one two-letter word per token and no spaces between them."""
    words = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
    # transformers tests stop strings after the word "abcdef".
    vocab = {word: index for index, word in enumerate(["<pad>", *words[: VOCAB - 2], "abcdef"])}
    backend = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


def speller() -> PreTrainedTokenizerFast:
    """Return a copy of the tokenizer that also encodes text and pads on the left."""
    made = copy.deepcopy(tokenizer())
    made.backend_tokenizer.pre_tokenizer = Split(SYLLABLES, "removed", invert=True)
    made.padding_side = "left"
    return made


def ragged_batch(lengths: tuple[int, ...] = (12, 9, 5, 11, 3), seed: int = 2) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    patterns = [torch.randint(3, VOCAB, (3,), generator=generator) for _ in lengths]
    rows = zip(patterns, lengths, strict=True)
    return left_padded([pattern.repeat(length)[:length] for pattern, length in rows])


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of the given prompts, padded on the left."""
    width = max(len(row) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long, device=DEVICE)
    mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def is_served(name: str, strategy: str) -> bool:
    """Return True if the tests run a strategy on the named model.

    Falcon heads require the attention interface; see also `PUBLISHED`.
    """
    if strategy in PUBLISHED:
        return name in PUBLISHED[strategy]
    return strategy != "falcon" or takes_packed(build(name))
