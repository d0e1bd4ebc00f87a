"""Compare drafters that follow the policy with ones that do not, in GRPO with TRL.

    python -m examples.studies.integrations.trl_refresh --out trl_refresh.json

Model: SmolLM2-135M-Instruct in float32, one thread. Every rollout of the training is generated once
per contender from the current policy, in rotating order; the following step updates all weights.
Processor time is measured. `lookup` also drafts from earlier rollouts. `falcon` uses the shipped
head unchanged, `falcon, refreshed` a copy that a `HeadRefresher` trains after each step. Both draft
chains of fixed length, so `tau` shows how well they follow the policy.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import hf_spec
from examples.studies.integrations.trl_rollouts import shorter
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.small_models import smollm2_135m_instruct
from hf_spec.evaluation.bench.runner import rotated

HEAD = Path("examples/adapters/smollm2-135m-falcon")
CHAIN = hf_spec.FalconConfig(tree="chain", max_draft_tokens=2)
NEW_TOKENS = 48
SAMPLES = 4
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a friend about a rainy day.",
    "What is the difference between a lake and a sea?",
    "Describe how bread is made, step by step.",
    "Write a Python function that reverses a list, and explain it.",
    "Give three reasons to learn a second language.",
)


class Refresh(TrainerCallback):
    """Callback that trains the head after every step of the policy."""

    def __init__(self, refresher: hf_spec.HeadRefresher, spent: list[float]):
        self.refresher, self.spent = refresher, spent

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Refresh the head, and record the processor seconds."""
        start = time.process_time()
        self.refresher.refresh()
        self.spent.append(time.process_time() - start)


def measure(
    model: Any, tokenizer: Any, scratch: Path, greedy: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """Train a copy of the model; return the results of each contender on every rollout."""
    policy = copy.deepcopy(model)
    heads = {"falcon": scratch / "frozen", "falcon, refreshed": scratch / "refreshed"}
    for folder in heads.values():
        shutil.copytree(HEAD, folder, dirs_exist_ok=True)
    contenders: dict[str, dict[str, Any]] = {
        "plain": {},
        "none": {"spec_strategy": "none"},
        "lookup": {"spec_strategy": hf_spec.LookupConfig(across_answers=True)},
        **{n: {"spec_strategy": CHAIN, "assistant": str(f)} for n, f in heads.items()},
    }
    refresher = hf_spec.HeadRefresher(
        policy, str(heads["falcon, refreshed"]), learning_rate=options.head_rate
    )
    refreshes: list[float] = []
    settings = GRPOConfig(
        output_dir=str(scratch / "out"),
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        # Fixes the length of rollouts.
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
    )
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    trainer = GRPOTrainer(
        policy,
        shorter,
        settings,
        Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[Refresh(refresher, refreshes)],
    )
    own, rollouts = policy.generate, list[dict[str, Any]]()

    def generate(*given: Any, **settings: Any) -> Any:
        rollout = own(*given, **settings)
        if greedy:
            # Training still uses the samples: identical completions would teach nothing.
            config = copy.deepcopy(settings.pop("generation_config"))
            config.do_sample = False
            settings["generation_config"] = config
        found, row = dict[str, Any](), dict[str, Any]()
        for name in rotated(list(contenders), len(rollouts)):
            start = time.process_time()
            with hf_spec.collect_stats() as stats:
                found[name] = own(*given, **settings, **contenders[name])
            row[name] = {"seconds": round(time.process_time() - start, 3)}
            if stats:
                row[name]["tau"] = round(stats[0].tau, 3)
        for name in contenders:
            row[name]["same"] = torch.equal(found[name], found["plain"])
        rollouts.append(row)
        return rollout

    object.__setattr__(policy, "generate", generate)
    trainer.train()
    # Skip the first rollout, which packs weights.
    counted = rollouts[1:]
    late = counted[-len(counted) // 3 :]
    table = {
        name: {
            "speedup": round(
                statistics.median(r["plain"]["seconds"] / r[name]["seconds"] for r in counted), 3
            ),
            "tau_first_third": _mean_tau(counted[: len(late)], name),
            "tau_last_third": _mean_tau(late, name),
            "same": sum(r[name]["same"] for r in rollouts) if greedy else None,
        }
        for name in contenders
    }
    return {
        "greedy": greedy,
        "table": table,
        "refresh_seconds": round(statistics.median(refreshes), 3),
        "rollouts": rollouts,
    }


def _mean_tau(rows: list[dict[str, Any]], name: str) -> float | None:
    taus = [row[name]["tau"] for row in rows if "tau" in row[name]]
    return round(statistics.mean(taus), 3) if taus else None


def main() -> None:
    """Measure, print the table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--head-rate", type=float, default=1e-4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = smollm2_135m_instruct()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    runs = []
    for greedy in (False, True):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as scratch:
            runs.append(measure(model, tokenizer, Path(scratch), greedy, options))
        print({k: v for k, v in runs[-1].items() if k != "rollouts"}, flush=True)
        rates = {"learning_rate": options.learning_rate, "head_rate": options.head_rate}
        write_json(options.out, {"environment": environment(), **rates, "runs": runs})


if __name__ == "__main__":
    main()
