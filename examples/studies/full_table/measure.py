"""Measure the tables of docs/benchmarks.md: every strategy and baseline on two small models.

Run `python -m examples.studies.full_table.measure --help` for the options, from the root of a
checkout, which contains the adapters. Each model's results are a JSON file and a folder of plots;
`python -m hf_spec.evaluation.bench.report` prints and plots them again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from hf_spec.cli.bench import run_and_write
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.cli.options import Placement
from hf_spec.common.prompts import load_prompts
from hf_spec.common.small_models import gemma3_270m, smollm2_135m_instruct
from hf_spec.evaluation.bench.report import markdown
from hf_spec.evaluation.bench.suite import Benchmark
from hf_spec.evaluation.settings import Suite
from hf_spec.methods.entries import Entry, parse_entries

# Strategies with a draft model, with default options.
DRAFTS = ("draft", "tree", "gsd")


@dataclass(frozen=True)
class TestedModel:
    """A model and the strategies that are measured on it.

    Attributes:
        name: name of the model.
        folder: function that returns the folder of the model.
        draft: assistant of `drafts`, unless `adapters` has a draft model.
        drafts: strategies with a draft model.
        adapters: method -> adapter of that method; missing ones are left out.
    """

    name: str
    folder: Callable[[], Path]
    draft: str
    drafts: tuple[str, ...]
    adapters: dict[str, str]

    def entries(self, adapters: Path) -> list[Entry]:
        """Return the strategies, with adapters from the folder `adapters`."""
        at = {method: str(adapters / name) for method, name in self.adapters.items()}
        found = {method: path for method, path in at.items() if Path(path).is_dir()}
        draft = found.get("draft", self.draft)
        texts = ["none", "lookup", *(f"{entry}@{draft}" for entry in self.drafts)]
        texts += [f"{method}@{path}" for method, path in found.items() if method != "draft"]
        for_auto = [found[method] for method in ("falcon", "draft") if method in found]
        return parse_entries([*texts, "auto"], for_auto)


MODELS = {
    "smollm2": TestedModel(
        "SmolLM2-135M-Instruct",
        smollm2_135m_instruct,
        "truncated:2",
        DRAFTS,
        {method: f"smollm2-135m-{method}" for method in ("draft", "disco", "falcon", "sdsat")},
    ),
    "gemma3": TestedModel(
        "Gemma-3-270M",
        gemma3_270m,
        "truncated:4",
        DRAFTS,
        {method: f"gemma-3-270m-{method}" for method in ("draft", "disco", "sdsat")},
    ),
}


def digests(tested: TestedModel, adapters: Path) -> dict[str, str]:
    """Return the SHA-256 of each adapter's weights, which shows if a record is current."""
    files = {
        name: adapters / name / "adapter_model.safetensors" for name in tested.adapters.values()
    }
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if path.is_file()
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the tables of each model and write its files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--adapters", type=Path, default=Path("examples/adapters"))
    parser.add_argument("--out", type=Path, required=True, help="folder, made if need be")
    parser.add_argument("--per-task", type=int, help="prompts of each task; all by default")
    parser.add_argument("--task", nargs="+", default=[], help="of these alone; all by default")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--no-compiled", action="store_true", help="leave compiling out")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device")
    options = parser.parse_args(argv)
    given = argv if argv is not None else sys.argv[1:]
    suite = Suite(
        batch_sizes=tuple(options.batch),
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        compiled=not options.no_compiled,
        profile=True,
        step_cost=True,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.model:
        tested = MODELS[name]
        folder = tested.folder()
        benchmark = Benchmark(
            load_target(str(folder), Placement(options.dtype, options.device)),
            load_tokenizer(str(folder)),
            load_prompts(per_task=options.per_task, tasks=options.task),
            tested.entries(options.adapters),
            suite,
        )
        command = f"python -m examples.studies.full_table.measure {' '.join(given)}"
        facts = {
            "command": command,
            "model": tested.name,
            "date": date.today().isoformat(),
            "adapters": digests(tested, options.adapters),
        }
        report = run_and_write(
            benchmark, facts, options.out / f"{name}.json", options.out / f"{name}_plots"
        )
        print(f"## {tested.name}\n\n{markdown(report)}")


if __name__ == "__main__":
    main()
