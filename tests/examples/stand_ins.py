"""Tiny random models under the names that a notebook loads, so that it runs unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers as T

from tests import published_heads as heads
from tests import tiny_models
from tests.targets.image_cases import TEXT, TOWER

TEMPLATE = "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}bebabe"
WITH_IMAGES = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}bebabe"
)


def qwen3_and_its_head(folder: Path) -> None:
    """Save a tiny Qwen3 as Qwen3-8B, and an EAGLE-3 head in the layout of the published one."""
    tokenizer = tiny_models.speller()
    tokenizer.chat_template = TEMPLATE
    _save(tiny_models.build("qwen3"), tokenizer, folder / "Qwen" / "Qwen3-8B")
    shutil.copytree(
        heads.sample("speculators").folder,
        folder / "RedHatAI" / "Qwen3-8B-speculator.eagle3",
    )


def llava(folder: Path) -> None:
    """Save a tiny LLaVA as LLaVA 1.5, with a processor of its kind for 32 x 32 images."""
    torch.manual_seed(0)
    tokenizer = tiny_models.speller()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    place: Any = tokenizer.convert_tokens_to_ids("<image>")
    config = T.LlavaConfig(
        text_config=T.LlamaConfig(**{**TEXT, "vocab_size": place + 1}),
        vision_config=T.CLIPVisionConfig(**TOWER),
        image_token_index=place,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    model: Any = T.LlavaForConditionalGeneration(config).eval()
    size = {"height": TOWER["image_size"], "width": TOWER["image_size"]}
    processor = T.LlavaProcessor(
        T.CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False),
        tokenizer,
        patch_size=TOWER["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=WITH_IMAGES,
    )
    _save(model, processor, folder / "llava-hf" / "llava-1.5-7b-hf")


def _save(model: Any, reader: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    reader.save_pretrained(folder)


# Stand-ins by the name of the notebook that uses them.
STAND_INS = {"eight_billion_on_colab": qwen3_and_its_head, "images": llava}
