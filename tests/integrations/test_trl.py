"""TRL with strategies in `generation_kwargs`: rollouts of a policy that changes every step.

Every rollout is compared with plain `generate()` on the same policy at the same step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_spec
from hf_spec import SpecStats, UnsupportedError, collect_stats
from hf_spec.backend.cpu.packed_weights import clear_cpu_packing, cpu_packing_bytes, set_cpu_packing
from hf_spec.evaluation.lossless.distribution import chi_square
from tests import tiny_models
from tests.identity import assert_identical

pytest.importorskip("trl", reason="needs the extra 'rl'")
# Silences a message of TRL's experimental trainers.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

pytestmark = pytest.mark.integration

STEPS = 3
NEW_TOKENS = 20
# Wide enough that matmuls on the CPU use packed weights.
WIDE = {**tiny_models.LLAMA_LIKE, "hidden_size": 256, "intermediate_size": 256}
FEW_TOKENS = 400


@pytest.fixture(autouse=True)
def packed() -> Iterator[None]:
    set_cpu_packing("on")
    yield
    set_cpu_packing("auto")
    clear_cpu_packing()


def new_policy(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    policy: Any = LlamaForCausalLM(LlamaConfig(**{**WIDE, "initializer_range": 0.1, **options}))
    return policy


def tokenizer() -> Any:
    made = tiny_models.speller()
    made.add_special_tokens({"eos_token": "abcdef"})
    return made


def prompts() -> list[str]:
    batch = tiny_models.prompts("llama", "ragged")
    rows = zip(*batch.values(), strict=True)
    return [tiny_models.tokenizer().decode(ids[mask.bool()]) for ids, mask in rows][:4]


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return increasing rewards, so that every step changes the policy."""
    return [float(place) for place in range(len(completions))]


@dataclass
class Rollouts:
    """Recorded rollouts of a training run.

    Attributes:
        said: sequences of each rollout, already compared with plain `generate()`.
        weights: sum of the policy's weights at each rollout.
        stats: statistics of the generations.
        packed: bytes of packed weights after each rollout.
    """

    said: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    stats: list[SpecStats] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)

    def watch(self, trainer: Any, method: str = "generate") -> None:
        """Wrap the policy's `method` to record and check its rollouts."""
        policy = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        own = getattr(policy, method)

        def watched(*args: Any, generation_config: Any, **options: Any) -> Any:
            with collect_stats() as stats:
                said = own(*args, generation_config=generation_config, **options)
            self.packed.append(cpu_packing_bytes())
            plain = copy.deepcopy(generation_config)
            plain.spec_strategy = None
            # Compare now, because the next step changes the policy.
            call = {**options, "spec_strategy": generation_config.spec_strategy}
            assert_identical(policy, call, said, own(*args, generation_config=plain, **options))
            self.said.append(said)
            self.weights.append(float(sum(p.double().sum() for p in policy.parameters())))
            self.stats += stats
            return said

        object.__setattr__(policy, method, watched)

    def check(self) -> None:
        assert len(self.said) == len(self.stats) == STEPS
        assert len(set(self.weights)) == STEPS, "every step changes the policy"
        assert sum(self.stats, SpecStats([])).accepted_tokens > 0
        assert all(self.packed)


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return {**given, **options}


def grpo(policy: PreTrainedModel, folder: Path, strategy: dict[str, Any], **options: Any) -> Any:
    lora = options.pop("peft_config", None)
    generation = {"do_sample": False, **strategy}
    args = GRPOConfig(
        **settings(folder, **options),
        num_generations=2,
        max_completion_length=NEW_TOKENS,
        generation_kwargs=generation,
    )
    return GRPOTrainer(
        policy,
        reward,
        args,
        Dataset.from_list([{"prompt": text} for text in prompts()]),
        processing_class=tokenizer(),
        peft_config=lora,
    )


def online_dpo(
    policy: PreTrainedModel, folder: Path, strategy: dict[str, Any], **options: Any
) -> Any:
    # With gradient checkpointing, the default, TRL disables the cache of rollouts.
    generation = {"do_sample": False, "use_cache": True, **strategy}
    args = OnlineDPOConfig(
        **settings(folder, **options),
        max_new_tokens=NEW_TOKENS,
        missing_eos_penalty=None,
        generation_kwargs=generation,
    )
    return OnlineDPOTrainer(
        policy,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts()]),
        processing_class=tokenizer(),
    )


TRAINERS = {"grpo": grpo, "online_dpo": online_dpo}


def train(trainer: Any, method: str = "generate") -> Rollouts:
    found = Rollouts()
    found.watch(trainer, method)
    trainer.train()
    return found


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a draft model: the first two layers of the untrained policy."""
    folder = tmp_path_factory.mktemp("draft")
    hf_spec.truncated_draft(new_policy(), 2).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("grpo", "lookup"), ("grpo", "auto"), ("online_dpo", "lookup"), ("online_dpo", "draft")],
)
def test_rollouts_are_those_of_the_policy_as_it_is(
    name: str, strategy: str, draft: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"spec_strategy": strategy}
    if strategy == "auto":
        given["spec_strategy"] = {"strategy": "auto", "timings": tiny_models.TIMINGS}
    if strategy != "lookup":
        given["assistant"] = draft
    train(TRAINERS[name](new_policy(), tmp_path, given)).check()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_mixed_precision_and_gradient_checkpointing(checkpointing: bool, tmp_path: Path) -> None:
    options = {"bf16": True, "gradient_checkpointing": checkpointing}
    train(grpo(new_policy(), tmp_path, {"spec_strategy": "lookup"}, **options)).check()


def test_a_lora_is_part_of_the_policy(tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    train(grpo(new_policy(), tmp_path, {"spec_strategy": "lookup"}, peft_config=lora)).check()


def test_dropout_in_the_policy_is_refused(tmp_path: Path) -> None:
    trainer = grpo(new_policy(attention_dropout=0.1), tmp_path, {"spec_strategy": "lookup"})
    with pytest.raises(UnsupportedError, match="training mode with dropout"):
        trainer.train()


def test_weights_from_elsewhere_are_used_at_once(tmp_path: Path) -> None:
    """Loaded or received weights change `parameter.data`, which no version counter tracks."""
    trainer = grpo(new_policy(), tmp_path, {"spec_strategy": "lookup"})
    found = Rollouts()
    found.watch(trainer)
    optimize = trainer.training_step

    def step(*args: Any, **options: Any) -> Any:
        for parameter in trainer.model.parameters():
            parameter.data.mul_(1.01)
        return optimize(*args, **options)

    trainer.training_step = step
    trainer.train()
    found.check()


def test_samples_follow_the_trained_policy(tmp_path: Path) -> None:
    """Sampled second tokens, which were drafted, follow the probabilities of the policy."""
    trainer = grpo(new_policy(), tmp_path, {"spec_strategy": "lookup", "do_sample": True})
    trainer.train()
    policy = trainer.model.eval()
    # Short, because the prompt is computed for every draw.
    text = tiny_models.settled_prompt("llama")[:, -12:]
    with torch.no_grad():
        first = policy(text).logits[0, -1].softmax(-1)
        then = torch.cat([text.expand(len(first), -1), torch.arange(len(first))[:, None]], 1)
        expected = first @ policy(then).logits[:, -1].softmax(-1)
    counts = torch.zeros(len(expected))
    policy.generation_config.eos_token_id = None
    torch.manual_seed(0)
    draft = hf_spec.truncated_draft(policy, 2)
    with collect_stats() as stats:
        for _ in range(10):
            said = policy.generate(
                text,
                do_sample=True,
                top_k=0,
                max_new_tokens=2,
                num_return_sequences=FEW_TOKENS,
                spec_strategy=hf_spec.DraftConfig(max_draft_tokens=1),
                assistant=draft,
            )
            counts += torch.bincount(said[:, -1], minlength=len(expected))
    assert sum(stats, SpecStats([])).drafted_tokens > 0
    pairs = list(zip((expected * counts.sum()).tolist(), counts.int().tolist(), strict=True))
    assert chi_square(pairs).p_value > 1e-6
