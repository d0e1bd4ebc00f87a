"""Models whose positions end with a table, and those whose positions have no end."""

from __future__ import annotations

import copy

import pytest
import transformers as T
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.engine.models.position_tables import num_positions
from tests import hybrid_models, tiny_models
from tests.targets import image_cases, whisper_cases
from tests.tiny_models import VOCAB, repetitive_prompt

SHORT = 32
# Learned, learned with reserved entries, and sinusoidal in the attention layers.
TABLES = {"gpt2", "gpt_bigcode_mha", "opt", "gptj", "codegen"}
# Rotary, ALiBi, and a sinusoidal table that grows.
OTHERS = {"llama", "phi", "falcon_alibi", "xglm"}


def shortened(name: str) -> PreTrainedModel:
    config = copy.deepcopy(tiny_models.build(name).config)
    config.max_position_embeddings = SHORT
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", sorted(TABLES | OTHERS))
def test_plain_generation_fails_past_the_last_position_only(name: str) -> None:
    model, prompt = shortened(name), repetitive_prompt(SHORT - 2)
    assert num_positions(model) == (SHORT if name in TABLES else None)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # The last token is not run.
    model.generate(prompt, max_new_tokens=3, **options)
    if name in TABLES:
        # `torch.gather` raises a RuntimeError.
        with pytest.raises((IndexError, RuntimeError)):
            model.generate(prompt, max_new_tokens=4, **options)
    else:
        model.generate(prompt, max_new_tokens=4, **options)


def test_every_tiny_model() -> None:
    found = {name for name in tiny_models.ARCHITECTURES if num_positions(tiny_models.build(name))}
    assert found == TABLES | {"gpt_bigcode_mqa"}


@pytest.mark.parametrize("name", ["jamba", "nemotron_h"])
def test_layers_without_positions(name: str) -> None:
    """Their configs have a length without rotary parameters, but nothing ends there."""
    model = hybrid_models.build(name)
    assert model.config.max_position_embeddings == 512
    assert num_positions(model) is None


def test_decoders_of_encoder_decoders() -> None:
    """The table of the encoder has another size."""
    whisper = whisper_cases.build()
    assert whisper.config.max_source_positions != whisper_cases.POSITIONS
    assert num_positions(whisper) == whisper_cases.POSITIONS
    # The decoder alone changes its config.
    alone = T.WhisperForCausalLM(copy.deepcopy(whisper.config))
    assert num_positions(alone) == whisper_cases.POSITIONS
    config = T.BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        decoder_layers=1,
        decoder_ffn_dim=16,
        decoder_attention_heads=2,
        max_position_embeddings=SHORT,
    )
    assert num_positions(T.BartForCausalLM(config)) == SHORT


def test_tables_of_another_modality() -> None:
    """The table of a vision tower is not that of the text; LLaVA's text has none."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = {**small, "intermediate_size": 16, "image_size": 32, "patch_size": 8}
    text = {**small, "intermediate_size": 16, "vocab_size": VOCAB}
    config = T.GitConfig(**text, max_position_embeddings=SHORT, vision_config=tower)
    assert num_positions(T.GitForCausalLM(config)) == SHORT
    llava = copy.deepcopy(image_cases.build("llava"))
    [table] = [m for name, m in llava.named_modules() if name.endswith("position_embedding")]
    llava.config.get_text_config().max_position_embeddings = len(table.weight)
    assert num_positions(llava) is None
