"""The model answers the prompts well, copies as much as is wanted, and ends by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hf_spec.cli.demo.prompts import PROMPTS
from hf_spec.cli.demo.results import copied_share

# What a right answer holds, and the share of it that may come from the prompt.
RIGHT = {
    "summary": (("1860s", "boneshaker", "Dunlop", "rubber tyre filled with air"), (0.8, 0.9)),
    "translation": (("```javascript\nfunction add(a, b) {\n    return a + b;\n}",), (0.6, 0.75)),
    "code": (("def is_palindrome(text):\n    return text == text[::-1]\n",), (0.0, 0.15)),
    "fact": (("energy from the sun", "light energy", "chemical energy"), (0.0, 0.0)),
}


@pytest.mark.real
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.id)
def test_the_model_answers_well_and_ends(prompt: Any, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = prompt.encode(tokenizer)
    output = model.generate(ids, do_sample=False, max_new_tokens=128)[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(output, skip_special_tokens=True)
    parts, (least, most) = RIGHT[prompt.id]
    assert output[-1] == tokenizer.eos_token_id
    assert [part for part in parts if part not in text] == []
    assert least <= copied_share(ids[0].tolist(), output) <= most
    # No loop: a run of eight tokens comes twice at most.
    runs = Counter(zip(*(output[start:] for start in range(8)), strict=False))
    assert max(runs.values()) <= 2
