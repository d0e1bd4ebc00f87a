"""Reproduce the five papers on Qwen2.5-Coder 1.5B with its 0.5B draft model, step by step.

    python -m examples.studies.real_models.papers --list
    python -m examples.studies.real_models.papers gsd-merging disco-transfer --work FOLDER \
        --train-prompts PROMPTS.jsonl --human-eval HumanEval.jsonl.gz

Without names, all steps run in order. Every step resumes an interrupted run, and writes its record
to a folder of `examples/studies` (or of --records). PROMPTS.jsonl has `id`, `task`, and `turns`;
ids of MBPP's training set start with "mbpp-", and prompts of the task "code" train the adaptive
tokens. The package human-eval contains the HumanEval file; without it, hf_spec's ten HumanEval
prompts are used. Run steps that measure time on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.studies.real_models.checkpoints import checkpoint
from hf_spec.common.tables import Table

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
STUDIES = Path(__file__).parents[1]


@dataclass(frozen=True)
class Step:
    """A command with its estimated minutes on two cores, and its memory in GB.

    Words in braces are replaced: {target}, {draft}, {work}, {records}, {mbpp}, {code}, and
    {human_eval}, which is a file or, without one, a task of the package's prompts. Options with
    the value {human_eval_file} are left out if there is no file.
    """

    name: str
    minutes: int
    gigabytes: int
    timed: bool
    words: str


SWEEP = (
    "examples.studies.gsd.sweep --model {target} --assistant {draft} --dtype bfloat16 "
    "--per-task 2 --new-tokens 64 --thresholds 0.2 0.3 --max-nodes 100 --max-draft-nodes 10000 "
    "--out {records}/gsd/qwen_sweep.json --merge-length -1 --merge-length 1"
)
SDSAT = "hf_spec train sdsat {draft} --responses {work}/code_answers.jsonl --dtype float32"
STEPS = (
    Step("gsd-merging", 40, 11, False, f"{SWEEP} --merge-length 0"),
    Step("gsd-children", 60, 11, False, f"{SWEEP} --children 1 2 3"),
    Step(
        "gsd-divergence",
        20,
        11,
        False,
        "examples.studies.gsd.merge_divergence --model {target} --assistant {draft} "
        "--dtype bfloat16 --per-task 1 --new-tokens 64 --max-draft-nodes 10000 "
        "--out {records}/gsd/qwen_merge_divergence.json",
    ),
    Step(
        "gsd-sampled",
        150,
        11,
        True,
        "examples.studies.lossless.sampling_rules --model {target} --dtype bfloat16 --per-task 2 "
        "--seeds 2 --human-eval {human_eval_file} --num-problems 40 --gsd {draft} "
        "--out {records}/gsd/qwen_sampled.json",
    ),
    Step(
        "disco-transfer",
        60,
        11,
        False,
        "examples.studies.disco.transfer --model {target} --assistant {draft} --dtype bfloat16 "
        "--train mbpp={mbpp} --judge human_eval={human_eval} --judge conversation=conversation "
        "--judge summarization=summarization --work {work}/disco "
        "--out {records}/disco/qwen_transfer.json",
    ),
    Step(
        "disco-train",
        10,
        11,
        False,
        "hf_spec train disco {target} --responses {work}/disco/mbpp/answers.jsonl --draft {draft} "
        "--dtype bfloat16 --out {work}/disco-adapter",
    ),
    Step(
        "disco-calibrate",
        60,
        11,
        True,
        "hf_spec calibrate disco {target} --adapter {work}/disco-adapter --prompts {mbpp} "
        "--dtype bfloat16 --max-prompts 6 --repeats 1",
    ),
    Step(
        "disco-speed",
        60,
        11,
        True,
        "hf_spec bench {target} --dtype bfloat16 --no-baselines --per-task 10 --task code "
        "--max-new-tokens 96 --repeats 1 --strategy draft:max_draft_tokens=2@{draft} "
        "--strategy draft:max_draft_tokens=3@{draft} --strategy draft:max_draft_tokens=5@{draft} "
        "--strategy draft:max_draft_tokens=8@{draft} "
        "--strategy draft:length_policy=heuristic@{draft} "
        "--strategy draft:length_policy=confidence@{draft} --strategy disco@{work}/disco-adapter "
        "--oracle {draft} --out {records}/disco/qwen_human_eval.json",
    ),
    Step(
        "ems-sd",
        180,
        6,
        True,
        "examples.studies.ems_sd.batches --model {draft} --dtype bfloat16 --tasks summarization "
        "--methods lookup --prompt-only --batch-sizes 1 4 8 16 --batches 3 --repeats 2 "
        "--out {records}/ems_sd/qwen_uncut.json",
    ),
    Step(
        "sdsat-answers",
        40,
        4,
        False,
        "hf_spec train responses {draft} --prompts {code} --out {work}/code_answers.jsonl "
        "--dtype bfloat16 --batch-size 32",
    ),
    Step(
        "sdsat-gated",
        240,
        12,
        False,
        f"{SDSAT} --mode gated --num-train-epochs 1 --learning-rate 0.002 "
        "--out {work}/sdsat-gated",
    ),
    Step(
        "sdsat-lora",
        240,
        12,
        False,
        f"{SDSAT} --mode lora --num-train-epochs 1 --infilling 0.5 --eval-steps 20 "
        "--out {work}/sdsat-lora",
    ),
    Step(
        "sdsat-basic",
        240,
        12,
        False,
        f"{SDSAT} --mode lora --loss basic --num-train-epochs 1 --infilling 0.5 --eval-steps 20 "
        "--out {work}/sdsat-basic",
    ),
    Step(
        "sdsat-full",
        60,
        20,
        False,
        "hf_spec train sdsat {draft} --responses {work}/code_answers.jsonl --dtype bfloat16 "
        "--mode full --num-train-epochs 1 --batch-tokens 512 --infilling 0.5 --eval-steps 20 "
        "--out {work}/sdsat-full",
    ),
    Step(
        "sdsat-losses",
        1,
        1,
        False,
        "examples.studies.trainings {work}/sdsat-lora {work}/sdsat-basic {work}/sdsat-full "
        "--figure clean_loss --out {records}/sdsat/qwen_trainings.json",
    ),
    Step(
        "sdsat-speed",
        240,
        6,
        True,
        "examples.studies.lossless.sampling_rules --model {draft} --dtype bfloat16 "
        "--sdsat {work}/sdsat-gated --temperatures 0 0.2 1 --top-k 10 --top-p 0.95 --seeds 1 "
        "--per-task 10 --tasks code --human-eval {human_eval_file} --num-problems 20 "
        "--out {records}/sdsat/qwen_sampled.json",
    ),
    Step(
        "sdsat-quality",
        120,
        6,
        False,
        "examples.studies.sdsat.task_quality --model {draft} --adapter {work}/sdsat-lora "
        "--tuned {work}/sdsat-full --dtype bfloat16 --human-eval {human_eval_file} "
        "--out {records}/sdsat/qwen_quality.json",
    ),
    Step(
        "sdsat-infilling",
        60,
        6,
        False,
        "examples.studies.sdsat.infilling --model {draft} --adapter {work}/sdsat-lora "
        "--gated {work}/sdsat-gated --dtype bfloat16 --human-eval {human_eval_file} --every 4 "
        "--python {studies}/timing.py {studies}/trainings.py "
        "--out {records}/sdsat/qwen_infilling.json",
    ),
    Step(
        "falcon-answers",
        20,
        4,
        False,
        "hf_spec train responses {draft} --prompts {code} --out {work}/falcon_answers.jsonl "
        "--dtype bfloat16 --batch-size 32 --max-new-tokens 128 --features last",
    ),
    Step(
        "falcon",
        240,
        8,
        False,
        "examples.studies.falcon.glancing --model {draft} --responses {work}/falcon_answers.jsonl "
        "--work {work}/falcon --layers 1 2 --out {records}/falcon/qwen_glancing.json",
    ),
)


def arguments(step: Step, words: Mapping[str, str]) -> list[str]:
    """Return the Python arguments of a step, without options whose file is missing."""
    found: list[str] = []
    for word in step.words.split():
        if word == "{human_eval_file}" and not words["human_eval_file"]:
            found.pop()
        else:
            found.append(word.format_map(words))
    return ["-m", *found]


def run_python(words: list[str]) -> None:
    """Run Python with these arguments in a separate process."""
    subprocess.run([sys.executable, *words], check=True)


def write_part(source: Path, chosen: str, out: Path) -> None:
    """Write the lines of a prompt file that contain `chosen`."""
    lines = source.read_text(encoding="utf-8").splitlines()
    out.write_text("".join(f"{line}\n" for line in lines if chosen in line), encoding="utf-8")


def linked(work: Path, name: str) -> str:
    """Link a checkpoint in `work`: adapters refer to a draft model in the same folder."""
    link = work / name
    if not link.exists():
        link.symlink_to(checkpoint(name).resolve(), target_is_directory=True)
    return str(link)


def steps(names: Sequence[str]) -> list[Step]:
    """Return the named steps, or all steps if there are no names."""
    return [step for step in STEPS if not names or step.name in names]


def table() -> str:
    """Return a Markdown table of all steps."""
    columns = {
        "step": lambda step: f"`{step.name}`",
        "minutes": lambda step: str(step.minutes),
        "memory, GB": lambda step: str(step.gigabytes),
        "needs an idle machine": lambda step: "yes" if step.timed else "no",
    }
    return Table.of(columns, STEPS).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*(step.name for step in STEPS), []])
    parser.add_argument("--list", action="store_true", help="print steps, minutes, and memory")
    parser.add_argument("--work", type=Path, help="folder of answers and adapters")
    parser.add_argument("--records", type=Path, default=STUDIES, help="folder of the records")
    parser.add_argument("--train-prompts", type=Path, help="JSON lines")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl.gz")
    options = parser.parse_args(argv)
    if options.list:
        print(table())
        return
    if options.work is None or options.train_prompts is None:
        parser.error("--work and --train-prompts are needed to run steps")
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    parts = {"mbpp": '"id": "mbpp-', "code": '"task": "code"'}
    words = {"work": str(options.work), "records": str(options.records), "studies": str(STUDIES)}
    for name, chosen in parts.items():
        words[name] = str(options.work / f"{name}.jsonl")
        write_part(options.train_prompts, chosen, Path(words[name]))
    words |= {"target": linked(options.work, TARGET), "draft": linked(options.work, DRAFT)}
    words["human_eval_file"] = str(options.human_eval or "")
    words["human_eval"] = words["human_eval_file"] or "code"
    for step in steps(options.names):
        print(f"{step.name}: about {step.minutes} minutes", flush=True)
        run_python(arguments(step, words))


if __name__ == "__main__":
    main()
