"""Continuous batching: two prompts run at a time, and a free row takes the next prompt."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec  # noqa: F401 - adds spec_strategy= to generate_batch() and generate_batch_iter()
from hf_spec.common.small_models import smollm2_135m_instruct

QUESTIONS = [
    "Name three animals that live in the sea and three that live in a forest.",
    "Say hello.",
    "What is the capital of France?",
    "Count from 1 to 10.",
]

folder = smollm2_135m_instruct()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    for question in QUESTIONS
]

for answer in model.generate_batch_iter(
    prompts, spec_strategy="lookup", max_batch=2, max_new_tokens=64, do_sample=False
):
    text = tokenizer.decode(answer.generated_tokens, skip_special_tokens=True)
    print(f"{answer.request_id}, tau {answer.spec_stats.tau:.2f}: {text}\n")
