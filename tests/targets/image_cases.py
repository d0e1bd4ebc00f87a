"""Tiny random image-text models, and prompts with images for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as T
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_models import LLAMA_LIKE, VOCAB, left_padded, shared

IMAGE, VIDEO, BEGIN, END = 90, 91, 92, 93
# Number of text tokens; the ids above are image placeholders and delimiters.
WORDS = 80
TEXT: dict[str, Any] = {**LLAMA_LIKE, "max_position_embeddings": 512}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
HYBRID_TOWER = {**QWEN_TOWER, "num_position_embeddings": 64}
# Recurrent layers and one attention layer.
HYBRID: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
# Heights and widths of images in patches; four patches are merged into one token.
GRIDS = [(4, 4), (6, 4)]

# (number of images of every row, generator) -> model inputs for the images of a batch.
Pixels = Callable[[Sequence[int], torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Family:
    """Model class with its config and image inputs.

    Attributes:
        model: the class.
        config: function that returns its config.
        pixels: function that returns the inputs for the images of a batch, given the number of
            images of every row.
        sizes: number of tokens of the first, second, ... image of a row.
        types: name of the input that marks image tokens, if there is one.
        num_images: number of images of each row in a ragged batch.
    """

    model: type[PreTrainedModel]
    config: Callable[[], Any]
    pixels: Pixels
    sizes: tuple[int, ...]
    types: str | None = None
    num_images: tuple[int, ...] = (1, 1, 1)


def _pictures(*shape: int, **others: Any) -> Pixels:
    def make(counts: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        pixels = torch.randn(sum(counts), *shape, generator=generator)
        more = {
            name: torch.tensor(value).repeat(sum(counts), *[1] * torch.tensor(value).ndim)
            for name, value in others.items()
        }
        return {"pixel_values": pixels, **more}

    return make


def _grids(counts: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the concatenated patches of all images, in the input format of the Qwen family."""
    grids = [(1, *grid) for count in counts for grid in GRIDS[:count]]
    patches = sum(height * width for _, height, width in grids)
    pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def _qwen(kind: str, vision: dict[str, Any], **text: Any) -> Family:
    def config() -> Any:
        made = getattr(T, f"{kind}Config")
        return made(text_config={**TEXT, **MROPE, **text}, vision_config=vision, **QWEN_IDS)

    sizes = tuple(height * width // 4 for height, width in GRIDS)
    model = getattr(T, f"{kind}ForConditionalGeneration")
    return Family(model, config, _grids, sizes, "mm_token_type_ids", (2, 1, 0))


def _gemma3() -> Any:
    text = {**TEXT, "head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8}
    return T.Gemma3Config(
        text_config={**text, "layer_types": WINDOWS, "tie_word_embeddings": False},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )


def _gemma4() -> Any:
    text = {
        **TEXT,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 12,
        "layer_types": [*WINDOWS, "sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        # The last two layers reuse the keys and values of the third and the second layer.
        "num_kv_shared_layers": 2,
        "tie_word_embeddings": False,
    }
    tower = {**TOWER, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4}
    tower.pop("image_size")
    return T.Gemma4Config(
        text_config=text,
        vision_config={**tower, "pooling_kernel_size": 2, "position_embedding_size": 64},
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        boi_token_id=BEGIN,
        eoi_token_id=END,
        vision_soft_tokens_per_image=4,
        tie_word_embeddings=False,
    )


def _paligemma() -> Any:
    text = {**TEXT, "model_type": "gemma", "head_dim": 8, "tie_word_embeddings": False}
    return T.PaliGemmaConfig(
        text_config=text,
        vision_config={**TOWER, "model_type": "siglip_vision_model", "projection_dim": 32},
        projection_dim=32,
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )


def _llava() -> Any:
    return T.LlavaConfig(
        text_config=T.LlamaConfig(**TEXT),
        vision_config=T.CLIPVisionConfig(**TOWER),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )


def _llava_onevision() -> Any:
    return T.LlavaOnevisionConfig(
        text_config=T.Qwen2Config(**TEXT),
        vision_config=T.SiglipVisionConfig(**TOWER),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[32, 32]],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )


def _mistral3() -> Any:
    return T.Mistral3Config(
        text_config=T.MistralConfig(**TEXT, sliding_window=None),
        vision_config=T.PixtralVisionConfig(**TOWER),
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _internvl() -> Any:
    return T.InternVLConfig(
        text_config=T.Qwen2Config(**TEXT),
        vision_config={**TOWER, "image_size": (32, 32), "patch_size": (8, 8)},
        image_token_id=IMAGE,
        image_seq_length=4,
        downsample_ratio=0.5,
    )


def _idefics(kind: str) -> Callable[[], Any]:
    return lambda: getattr(T, f"{kind}Config")(
        text_config=T.LlamaConfig(**TEXT),
        vision_config=TOWER,
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )


def _lfm2_vl() -> Any:
    kinds = ["conv", "conv", "full_attention", "conv"]
    tower = {name: TOWER[name] for name in TOWER if name != "image_size"}
    return T.Lfm2VlConfig(
        text_config=T.Lfm2Config(**{**TEXT, "num_hidden_layers": len(kinds)}, layer_types=kinds),
        vision_config=T.Siglip2VisionConfig(**tower, num_patches=16),
        image_token_id=IMAGE,
        downsample_factor=2,
        projector_hidden_size=32,
    )


def _llama4() -> Any:
    text = {**TEXT, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2}
    chunks = {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1], "floor_scale": 4}
    return T.Llama4Config(
        text_config={**text, **chunks, "attn_scale": 1.0},
        vision_config={
            **TOWER,
            "intermediate_size": 128,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        image_token_index=IMAGE,
    )


_CORNERS = [[column, line] for line in range(4) for column in range(4)]
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        T.Gemma3ForConditionalGeneration,
        _gemma3,
        _pictures(3, 32, 32),
        (4, 4),
        "token_type_ids",
        (2, 1, 0),
    ),
    "gemma4": Family(
        T.Gemma4ForConditionalGeneration,
        _gemma4,
        _pictures(16, 48, image_position_ids=_CORNERS),
        (4, 4),
        "mm_token_type_ids",
        (2, 1, 0),
    ),
    "qwen2_vl": _qwen(
        "Qwen2VL",
        {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 4,
            "mlp_ratio": 2,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL", {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": _qwen(
        "Qwen3VL",
        {**QWEN_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        head_dim=8,
    ),
    "qwen3_5": _qwen("Qwen3_5", HYBRID_TOWER, **HYBRID),
    "qwen3_5_moe": _qwen(
        "Qwen3_5Moe",
        HYBRID_TOWER,
        **HYBRID,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "llama4": Family(
        T.Llama4ForConditionalGeneration, _llama4, _pictures(3, 32, 32), (4, 4), None, (2, 1, 0)
    ),
    "llava": Family(
        T.LlavaForConditionalGeneration, _llava, _pictures(3, 32, 32), (16, 16), None, (2, 1, 0)
    ),
    "llava_onevision": Family(
        T.LlavaOnevisionForConditionalGeneration,
        _llava_onevision,
        _pictures(2, 3, 32, 32, image_sizes=[32, 32]),
        (36,),
        None,
        (1, 1, 0),
    ),
    "mistral3": Family(
        T.Mistral3ForConditionalGeneration,
        _mistral3,
        _pictures(3, 32, 32, image_sizes=[32, 32]),
        (4, 4),
        None,
        (2, 1, 0),
    ),
    "internvl": Family(
        T.InternVLForConditionalGeneration, _internvl, _pictures(3, 32, 32), (4, 4), None, (2, 1, 0)
    ),
    # These models pad all rows to the same number of images, so each row has one here.
    "idefics3": Family(
        T.Idefics3ForConditionalGeneration, _idefics("Idefics3"), _pictures(1, 3, 32, 32), (4,)
    ),
    "smolvlm": Family(
        T.SmolVLMForConditionalGeneration, _idefics("SmolVLM"), _pictures(1, 3, 32, 32), (4,)
    ),
    "lfm2_vl": Family(
        T.Lfm2VlForConditionalGeneration,
        _lfm2_vl,
        _pictures(16, 192, spatial_shapes=[4, 4], pixel_attention_mask=[1] * 16),
        (4, 4),
        None,
        (2, 1, 0),
    ),
    # PaliGemma also takes token types.
    "paligemma": Family(
        T.PaliGemmaForConditionalGeneration,
        _paligemma,
        _pictures(3, 32, 32),
        (16,),
        "token_type_ids",
    ),
}


@shared
def build(name: str) -> PreTrainedModel:
    """Return a random model of a family, built once per session; do not modify it."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    made: Any = family.model._from_config(family.config())
    model: PreTrainedModel = made.eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1 and weight.std() == 0:
                # Norms and biases start as ones and zeros, which would hide mistakes.
                weight.add_(torch.randn_like(weight) * 0.1)
            elif weight.dim() >= 2 and weight.std() < 0.1:
                weight.normal_(0, 0.25)
    model.generation_config = T.GenerationConfig(pad_token_id=0)
    return model


def with_images(name: str, kind: str, seed: int = 7) -> dict[str, Tensor]:
    """Return inputs with images: `one` prompt, or a `ragged` batch of three."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    ragged = family.num_images if kind == "ragged" else (len(family.sizes),)

    def words(count: int) -> list[int]:
        return torch.randint(3, WORDS, (count,), generator=generator).tolist()

    rows = []
    for row, count in enumerate(ragged):
        tokens = words(3 + 4 * row)
        for size in family.sizes[:count]:
            tokens += [BEGIN, *[IMAGE] * size, END, *words(3)]
        rows.append(torch.tensor(tokens + words(4 + row)))
    inputs = left_padded(rows)
    if family.types is not None:
        shown = (inputs["input_ids"] == IMAGE).long()
        # In PaliGemma, 0 marks the part of the prompt with bidirectional attention.
        inputs[family.types] = torch.zeros_like(shown) if name == "paligemma" else shown
    return {**inputs, **family.pixels(ragged, generator)}


def without_images(kind: str, seed: int = 3) -> dict[str, Tensor]:
    """Return text-only inputs: `one` prompt, or a `ragged` batch of three."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (17, 9, 4) if kind == "ragged" else (17,)
    return left_padded([torch.randint(3, WORDS, (n,), generator=generator) for n in lengths])
