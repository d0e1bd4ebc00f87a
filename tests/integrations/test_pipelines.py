"""Pipelines of transformers pass on a strategy and its assistant, also for batches.

See also `generation/test_hook.py` (text) and `targets/test_whisper.py` (speech recognition).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import transformers as T
from PIL import Image

import hf_spec
from hf_spec import SpecStats, collect_stats
from tests import tiny_models
from tests.targets.image_cases import IMAGE, build

SIZE, NEW_TOKENS = 32, 24


def image_text_pipeline() -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny_models.speller()
    image = tokenizer.convert_ids_to_tokens(IMAGE)
    pixels = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    processor = T.LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token=image,
        num_additional_image_tokens=1,
    )
    return T.ImageTextToTextPipeline(model=build("llava"), processor=processor)


def pictures(count: int) -> list[Image.Image]:
    noise = random.Random(0)
    sizes = [SIZE * SIZE * 3] * count
    return [Image.frombytes("RGB", (SIZE, SIZE), noise.randbytes(size)) for size in sizes]


@pytest.mark.parametrize("strategy", ["lookup", "tree"])
def test_images_and_texts(strategy: str) -> None:
    pipe: Any = image_text_pipeline()
    place = pipe.processor.image_token
    texts = [place + "bababebibobabebibo", place + "ceciceci" * 3, place + "dodo"]
    given: dict[str, Any] = {"spec_strategy": strategy}
    if strategy == "tree":
        given["assistant"] = hf_spec.truncated_draft(build("llava"), 2)
    found = []
    for options in ({}, given):
        call = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
        with collect_stats() as stats:
            one = pipe(images=pictures(1), text=texts[0], generate_kwargs=call)
            images = [[picture] for picture in pictures(3)]
            batch = pipe(images=images, text=texts, batch_size=3, generate_kwargs=call)
        found.append((one, batch))
        assert (sum(stats, SpecStats([])).accepted_tokens > 0) == bool(options)
        assert len(stats) == (2 if options else 0)
    assert found[0] == found[1]
    assert len({said["generated_text"] for said in found[0][1]}) == 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_with_a_draft_model(batch_size: int) -> None:
    model = tiny_models.build("llama")
    tokenizer: Any = tiny_models.speller()
    pipe = T.pipeline("text-generation", model=model, tokenizer=tokenizer)
    batch = tiny_models.prompts("llama", "ragged")
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(*batch.values(), strict=True)]
    found = []
    for options in ({}, tiny_models.speculation("llama", "tree")):
        with collect_stats() as stats:
            said = pipe(
                texts, batch_size=batch_size, max_new_tokens=NEW_TOKENS, do_sample=False, **options
            )
        found.append(said)
        assert (sum(stats, SpecStats([])).accepted_tokens > 0) == bool(options)
    assert found[0] == found[1]
