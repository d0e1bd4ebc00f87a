"""Time rollouts of GRPO and online DPO in TRL, with a strategy and with plain `generate()`.

    python -m examples.studies.integrations.trl_rollouts --trainers grpo
    python -m examples.studies.integrations.trl_rollouts --trainers online_dpo --add

Model: SmolLM2-135M-Instruct in float32, one thread. Every rollout of the training is generated
twice from the current policy, plain and with the strategy, in alternating order; the following step
updates all weights. Processor time is measured, so that other processes matter less.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

import hf_spec
from hf_spec.common.machine import environment

NEW_TOKENS = 48
PROMPTS = (
    "Repeat this sentence three times: The old clock in the hall has stopped at noon.",
    "Correct the spelling and write it out again: I have recieved teh letter yesterdey.",
)


def shorter(completions: list[Any], **_: Any) -> list[float]:
    """Reward short completions."""
    return [-float(len(str(completion))) for completion in completions]


def grpo(policy: Any, tokenizer: Any, generation: dict[str, Any], **settings: Any) -> Any:
    """Return a GRPO trainer with two completions per prompt."""
    args = GRPOConfig(
        **settings,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=NEW_TOKENS,
        generation_kwargs=generation,
    )
    return GRPOTrainer(policy, shorter, args, texts(), processing_class=tokenizer)


def online_dpo(policy: Any, tokenizer: Any, generation: dict[str, Any], **settings: Any) -> Any:
    """Return an online DPO trainer, which always samples two completions per prompt."""
    args = OnlineDPOConfig(
        **settings,
        per_device_train_batch_size=2,
        max_new_tokens=NEW_TOKENS,
        missing_eos_penalty=None,
        # With gradient checkpointing, the default, TRL disables the KV cache in rollouts.
        generation_kwargs={**generation, "use_cache": True},
    )
    return OnlineDPOTrainer(
        policy,
        reward_funcs=shorter,
        args=args,
        train_dataset=texts(),
        processing_class=tokenizer,
    )


TRAINERS = {"grpo": grpo, "online_dpo": online_dpo}


def texts() -> Dataset:
    """Return the prompts as a data set for TRL."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS])


def measure(
    method: str, model: Any, tokenizer: Any, strategy: str, greedy: bool, steps: int
) -> dict[str, Any]:
    """Train a copy of the model, and time every rollout with and without the strategy."""
    rollouts: list[dict[str, Any]] = []
    generation = {
        "do_sample": not greedy,
        "spec_strategy": strategy,
        # Fixes the length of rollouts.
        "min_new_tokens": NEW_TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[method](
            copy.deepcopy(model),
            tokenizer,
            generation,
            output_dir=folder,
            max_steps=steps,
            learning_rate=1e-5,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
        )
        policy: Any = trainer.model
        own = policy.generate

        def generate(*given: Any, generation_config: Any, **options: Any) -> Any:
            found, timed = dict[str, Any](), dict[str, Any]()
            plain = copy.deepcopy(generation_config)
            plain.spec_strategy = None
            order = [("plain", plain), ("speculative", generation_config)]
            for name, config in order if len(rollouts) % 2 else order[::-1]:
                start = time.process_time()
                with hf_spec.collect_stats() as stats:
                    found[name] = own(*given, generation_config=config, **options)
                timed[name] = time.process_time() - start
                if stats:
                    timed["forwards"] = stats[0].target_forwards
                    timed["tau"] = stats[0].tau
            same = torch.equal(found["plain"], found["speculative"])
            rollouts.append({**timed, "same": same})
            return found["speculative"]

        object.__setattr__(policy, "generate", generate)
        trainer.train()
    # Skip the first rollout, which packs weights and measures round costs.
    counted = rollouts[1:]
    ratios = sorted(one["plain"] / one["speculative"] for one in counted)
    return {
        "trainer": method,
        "strategy": strategy,
        "greedy": greedy,
        "speed": round(statistics.median(ratios), 3),
        "least": round(ratios[0], 3),
        "most": round(ratios[-1], 3),
        "same": f"{sum(one['same'] for one in rollouts)} of {len(rollouts)}" if greedy else None,
        "rollouts": rollouts,
    }


def main() -> None:
    """Measure, print the results, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("trl.json"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--strategies", nargs="+", default=["lookup", "auto"])
    parser.add_argument("--add", action="store_true", help="to what the record has")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_spec.common.small_models import smollm2_135m_instruct

    torch.set_num_threads(1)
    folder = smollm2_135m_instruct()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    found = json.loads(options.out.read_text("utf-8"))["runs"] if options.add else []
    for method, strategy, greedy in product(options.trainers, options.strategies, (True, False)):
        found.append(measure(method, model, tokenizer, strategy, greedy, options.steps))
        print({k: v for k, v in found[-1].items() if k != "rollouts"}, flush=True)
        options.out.write_text(json.dumps({"machine": environment(), "runs": found}, indent=1))


if __name__ == "__main__":
    main()
