"""SmolLM2-135M in 4-bit bitsandbytes on the CPU: same tokens with the kernel, up to ties."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as T
from hf_spec_kernels import launches

import hf_spec
from hf_spec.backend.cpu.four_bit import is_four_bit
from hf_spec.common.small_models import smollm2_135m_instruct
from hf_spec.evaluation.lossless.mismatch import TIE, differences
from tests.compiler import needs_compiler

pytest.importorskip("bitsandbytes")

pytestmark = [pytest.mark.real, pytest.mark.full, needs_compiler]

NEW_TOKENS = 24


@pytest.fixture(scope="module", params=["default layout", "row-major"])
def model(request: pytest.FixtureRequest) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    config = T.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    model = T.AutoModelForCausalLM.from_pretrained(
        smollm2_135m_instruct(), dtype=torch.bfloat16, quantization_config=config
    ).eval()
    for module in model.modules():
        if request.param == "row-major" and hasattr(module, "support_avx512bf16_for_cpu"):
            # Simulate a processor without AVX512-BF16.
            module.support_avx512bf16_for_cpu = False
    return model


@pytest.mark.parametrize("strategy", ["none", "lookup", "draft"])
def test_its_own_output_up_to_ties(model: Any, strategy: str) -> None:
    tokenizer = T.AutoTokenizer.from_pretrained(smollm2_135m_instruct())
    prompt = tokenizer("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):", return_tensors="pt")
    ids, call = prompt["input_ids"], {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(ids, **call)
    assistant = hf_spec.truncated_draft(model, 10) if strategy == "draft" else None
    ran = launches["four_bit_linear"]
    found = model.generate(ids, **call, spec_strategy=strategy, assistant=assistant)
    assert (launches["four_bit_linear"] > ran) == any(map(is_four_bit, model.modules()))
    for difference in differences(model, ids, plain[0].tolist(), found[0].tolist(), NEW_TOKENS):
        assert difference.kind == TIE, difference
