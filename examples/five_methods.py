"""Compare four trained drafters on a batch; the fifth method, EMS-SD, avoids padding the batch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec.common.small_models import smollm2_135m_instruct

ADAPTERS = Path(__file__).parent / "adapters"
METHODS = {
    "SDSAT": (hf_spec.SdsatConfig(num_adaptive=3), "smollm2-135m-sdsat"),
    "DISCO": ("disco", "smollm2-135m-disco"),
    "GSD": ("gsd", "smollm2-135m-draft"),
    "Falcon": ("falcon", "smollm2-135m-falcon"),
}
QUESTIONS = ["Why is the sky blue?", "Write a Python loop that prints the numbers from 1 to 5."]

folder = smollm2_135m_instruct()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
batch = tokenizer.apply_chat_template(
    [[{"role": "user", "content": question}] for question in QUESTIONS],
    add_generation_prompt=True,
    padding=True,
    return_tensors="pt",
    return_dict=True,
)
settings = {"max_new_tokens": 48, "do_sample": False}
plain = model.generate(**batch, **settings)

table = Table("method", "tokens", "forwards", "tau", "draft forwards", "padding", "same text")
for name, (strategy, adapter) in METHODS.items():
    output = model.generate(
        **batch,
        **settings,
        spec_strategy=strategy,
        assistant=ADAPTERS / adapter,
        return_dict_in_generate=True,
    )
    stats = output.spec_stats
    counts = (stats.new_tokens, stats.target_forwards, f"{stats.tau:.2f}", stats.draft_forwards)
    same = output.sequences.equal(plain)
    table.add_row(name, *map(str, counts), str(stats.target_padding), str(same))
Console().print(table)
