"""Plain and speculative generation: the same text in fewer forward passes of the model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec  # noqa: F401 - adds spec_strategy= and assistant= to generate()
from hf_spec.common.small_models import smollm2_135m_instruct

FALCON = Path(__file__).parent / "adapters" / "smollm2-135m-falcon"
QUESTION = "Write a Python function that returns the largest number of a list."

folder = smollm2_135m_instruct()  # or the name of any decoder-only model
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": QUESTION}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
settings = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}

plain = model.generate(**inputs, **settings)
prompt_len = inputs["input_ids"].shape[1]
print(tokenizer.decode(plain.sequences[0, prompt_len:], skip_special_tokens=True), "\n")

for method in ({"spec_strategy": "lookup"}, {"spec_strategy": "falcon", "assistant": FALCON}):
    output = model.generate(**inputs, **settings, **method)
    stats = output.spec_stats
    counts = f"{stats.new_tokens} tokens in {stats.target_forwards} forwards, tau {stats.tau:.2f}"
    same = output.sequences.equal(plain.sequences)
    print(f"{method['spec_strategy']}: {counts}, same text: {same}")
