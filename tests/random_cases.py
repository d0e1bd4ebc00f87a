"""Calls of `generate()` drawn at random: architecture, strategy, prompts and options.

A case is told by its number alone, so a failure can be run again by hand:
`python -c "from tests.random_cases import draw; print(draw(17))"`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_spec.engine.forward.tree_attention import takes_packed
from hf_spec.methods.registry import parse_strategy
from tests import tiny_models
from tests.identity import difference
from tests.tiny_models import ARCHITECTURES, STRATEGIES, VOCAB

# Levels of the deepest draft of heads that propose all levels in one pass.
SHALLOW = {"heads": 3, "block": 5}
BATCHING = ("unpadded", "unpadded", "unpadded_kv", "unpadded_input", "padded")


@dataclass(frozen=True)
class Case:
    """One call, and how its strategy differs from the default.

    Attributes:
        model: architecture.
        strategy: name.
        changes: fields of its config.
        lengths: of the prompts.
        seed: of the prompts.
        options: further arguments of `generate()`.
    """

    model: str
    strategy: str
    changes: dict[str, Any]
    lengths: tuple[int, ...]
    seed: int
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> dict[str, Tensor]:
        """Prompts padded on the left; every other one is what the model says by itself."""
        generator = torch.Generator().manual_seed(self.seed)
        settled = tiny_models.settled_prompt(self.model)[0]
        rows = []
        for index, length in enumerate(self.lengths):
            period = int(torch.randint(1, 9, (1,), generator=generator))
            pattern = torch.randint(3, VOCAB, (period,), generator=generator)
            own = pattern.repeat(length)[:length]
            rows.append(settled[-length:] if (index + self.seed) % 2 else own)
        return tiny_models.left_padded(rows)

    def speculation(self) -> dict[str, Any]:
        """Strategy and assistant; the text is drawn with them as without them."""
        given = tiny_models.speculation(self.model, self.strategy)
        config = parse_strategy(given["spec_strategy"])
        known = {name: value for name, value in self.changes.items() if hasattr(config, name)}
        if self.strategy == "disco":
            # Its classifier is its policy.
            known.pop("length_policy", None)
        if self.strategy in SHALLOW and "max_draft_tokens" in known:
            known["max_draft_tokens"] = min(known["max_draft_tokens"], SHALLOW[self.strategy])
        if not takes_packed(tiny_models.build(self.model)):
            known.pop("batching", None)
        return {**given, "spec_strategy": replace(config, **known)}

    def generate(self, speculative: bool, **options: Any) -> Any:
        """The output of one call, greedy."""
        given = {**self.options, "do_sample": False, "return_dict_in_generate": True, **options}
        if speculative:
            given |= self.speculation()
        return tiny_models.build(self.model).generate(**self.inputs(), **given)

    def report(self, expected: Any, found: Any) -> str:
        """How the tokens differ, "" if they are equal."""
        call = {**self.inputs(), **self.options, **self.speculation()}
        tokenizer = tiny_models.tokenizer()
        return difference(tiny_models.build(self.model), call, found, expected, tokenizer=tokenizer)


def draw(number: int) -> Case:
    """The case of that number."""
    dice = random.Random(number)
    strategy = dice.choice(STRATEGIES)
    models = [name for name in ARCHITECTURES if tiny_models.is_served(name, strategy)]
    rows = dice.choice((1, 1, 2, 3, 5))
    options: dict[str, Any] = {"max_new_tokens": dice.randint(1, 24)}
    for make in dice.sample(OPTIONS, dice.choice((0, 1, 1, 2, 3))):
        options |= make(dice)
    if "forced_eos_token_id" in options:
        # transformers refuses to force a token that is suppressed.
        options.pop("suppress_tokens", None)
    if "min_new_tokens" in options:
        options["min_new_tokens"] = min(options["min_new_tokens"], options["max_new_tokens"])
    return Case(
        model=dice.choice(models),
        strategy=strategy,
        changes=_changes(dice),
        lengths=tuple(dice.randint(1, 30) for _ in range(rows)),
        seed=number,
        options=options,
    )


def differences(case: Case, expected: Any, found: Any) -> list[str]:
    """What a speculative output has that the plain one has not."""
    if not torch.equal(expected.sequences, found.sequences):
        return [case.report(expected, found)]
    wrong = []
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if (ours is None) != (theirs is None) or len(ours or ()) != len(theirs or ()):
            wrong.append(f"{name}: {len(ours or ())} steps, not {len(theirs or ())}")
            continue
        for step, (mine, other) in enumerate(zip(ours or (), theirs or (), strict=True)):
            # Rows that have ended go on in plain generate(), unseen; nothing is promised of them.
            running = _running(expected.sequences, step, len(theirs))
            close = torch.isclose(mine, other, rtol=1e-3, atol=1e-3).all(dim=1) | ~running
            if not close.all():
                wrong.append(f"{name} of step {step}")
    return wrong


def _running(sequences: Tensor, step: int, steps: int) -> Tensor:
    """(B,) bool: rows with a token that is no padding at `step` or later."""
    return (sequences[:, sequences.shape[1] - steps + step :] != 0).any(dim=1)


def _changes(dice: random.Random) -> dict[str, Any]:
    """Some fields; a config takes those that it has."""
    pool: dict[str, Any] = {
        "batching": dice.choice(BATCHING),
        "max_draft_tokens": dice.randint(1, 9),
        "length_policy": dice.choice(("static", "heuristic", "confidence")),
        "match_length": dice.randint(1, 4),
        "copy_length": dice.randint(1, 9),
        "max_matches": dice.randint(1, 4),
        "children": dice.randint(1, 4),
        "merge_length": dice.randint(0, 3),
        "fused": dice.random() < 0.5,
    }
    return {name: pool[name] for name in dice.sample(sorted(pool), dice.randint(0, 4))}


def _tokens(dice: random.Random, count: int) -> list[int]:
    return sorted(dice.sample(range(1, VOCAB), count))


def _eos(dice: random.Random) -> dict[str, Any]:
    return {"eos_token_id": _tokens(dice, dice.randint(1, 12))}


def _outputs(dice: random.Random) -> dict[str, Any]:
    return {"output_scores": True, "output_logits": dice.random() < 0.5}


def _stop_strings(dice: random.Random) -> dict[str, Any]:
    tokenizer = tiny_models.tokenizer()
    texts = [tokenizer.decode(_tokens(dice, 1)) for _ in range(8)]
    return {"stop_strings": texts, "tokenizer": tokenizer, "eos_token_id": [VOCAB - 1]}


OPTIONS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    _eos,
    _eos,
    _outputs,
    _stop_strings,
    lambda dice: {"repetition_penalty": dice.choice((0.7, 1.2, 1.5))},
    lambda dice: {"no_repeat_ngram_size": dice.randint(1, 4)},
    lambda dice: {"min_new_tokens": dice.randint(1, 12), **_eos(dice)},
    lambda dice: {"suppress_tokens": _tokens(dice, 6)},
    lambda dice: {"begin_suppress_tokens": _tokens(dice, 6)},
    lambda dice: {"bad_words_ids": [_tokens(dice, dice.randint(1, 2)) for _ in range(6)]},
    lambda dice: {"encoder_repetition_penalty": dice.choice((0.8, 1.3))},
    lambda dice: {"forced_eos_token_id": dice.randint(1, VOCAB - 1)},
    lambda dice: {"renormalize_logits": True},
    lambda dice: {"exponential_decay_length_penalty": (dice.randint(1, 6), 1.2), **_eos(dice)},
    lambda dice: {
        "sequence_bias": [[_tokens(dice, dice.randint(1, 3)), dice.uniform(-3, 3)] for _ in "ab"]
    },
)
