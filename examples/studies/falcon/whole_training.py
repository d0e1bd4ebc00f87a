"""Train a Falcon head from prompts: answers, training, quantization, and calibration of the tree.

Run as `python -m examples.studies.falcon.whole_training --model MODEL --prompts PROMPTS.jsonl
--work FOLDER --out HEAD`, in the background; options after `--` are those of `hf-spec train
falcon`. Every part resumes an interrupted run. `FOLDER`, which may be outside a checkout, stores
answers, features and checkpoints.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from hf_spec.methods.falcon.settings import FalconTrainSettings
from hf_spec.training.held_out import split_by_hash
from hf_spec.training.responses import read_responses

# Held-out answers for `hf-spec calibrate falcon`.
HELD = "held-back.jsonl"


def commands(options: argparse.Namespace) -> list[list[str]]:
    """Return the `hf-spec` arguments of each part."""
    found, answers = [], []
    target = [options.model]
    kept = "fused" if "--fused" in options.train else "last"
    for seed, temperature in enumerate(options.temperatures):
        out = options.work / f"answers-{temperature:g}.jsonl"
        answers += ["--responses", str(out)]
        words = ["train", "responses", *target, "--prompts", options.prompts, "--out", out]
        words += ["--temperature", f"{temperature:g}", "--seed", seed, "--features", kept]
        words += ["--max-new-tokens", options.new_tokens, "--dtype", options.dtype]
        found.append(words)
    trained = ["train", "falcon", *target, *answers, "--out", options.out, "--dtype", options.dtype]
    found.append([*trained, *options.train])
    if options.bits:
        found.append(["shrink", options.out, "--bits", options.bits])
    others = ["--adapter", options.out, "--responses", options.work / HELD]
    found.append(["calibrate", "falcon", *target, *others])
    return [[str(word) for word in words] for words in found]


def run_part(words: list[str]) -> None:
    """Run `hf-spec` with these arguments in a separate process."""
    subprocess.run([sys.executable, "-m", "hf_spec", *words], check=True)


def write_held_back(work: Path) -> int:
    """Write the held-out answers of a training on those in `work`; return their number."""
    share = FalconTrainSettings().held_back
    held: list[str] = []
    for path in sorted(work.glob("answers-*.jsonl")):
        head, *lines = path.read_text().splitlines()
        known = list(zip(lines, read_responses(path), strict=True))
        held += [line for line, _ in split_by_hash(known, share, lambda pair: pair[1].id)[1]]
    (work / HELD).write_text("\n".join([head, *held]) + "\n")
    return len(held)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is kept")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="of the answers"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--dtype", default="bfloat16", help="of the target while it answers")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of the head's matrices")
    parser.add_argument("train", nargs="*", help="options of hf-spec train falcon")
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    for words in commands(options):
        if words[0] == "calibrate":
            print(f"{write_held_back(options.work)} answers were held back")
        print("hf-spec", *words, flush=True)
        run_part(words)


if __name__ == "__main__":
    main()
