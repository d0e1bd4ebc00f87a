"""Write the tables of docs/papers/*.md: claims of the papers and our records, in the same metric.

    python -m docs.paper_tables

Tables are written between `<!-- table: NAME -->` and `<!-- end -->`. Our figures come from the
records in examples/studies. Those of the papers come from papers/claims.json, which was copied from
their tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from examples.studies import trainings
from examples.studies.sdsat import task_quality
from hf_spec.common.tables import Table

FOLDER = Path(__file__).parent / "papers"
EXAMPLES = FOLDER.parents[1] / "examples"
CLAIMS = json.loads((FOLDER / "claims.json").read_text("utf-8"))
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Names of the sum over all tasks in records.
ALL = (None, "all")
Rows = list[Sequence[Any]]
FALCON = "falcon/smollm2_falcon"
QWEN_SDSAT = "sdsat:num_adaptive=3@sdsat-gated"
# Options that were calibrated on MBPP's training set, like the classifier.
TRANSFERRED = "acceptance_threshold=0.3,max_draft_tokens=12"


def load(name: str) -> dict[str, Any]:
    """Read a record of a study."""
    found: dict[str, Any] = json.loads((EXAMPLES / "studies" / name).read_text("utf-8"))
    return found


def recorded(names: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Read the records that exist, by their labels."""
    return {
        label: load(name) for label, name in names.items() if (EXAMPLES / "studies" / name).exists()
    }


def adapter(name: str) -> dict[str, Any]:
    """Return the options of a shipped adapter."""
    file = EXAMPLES / "adapters" / name / "adapter_config.json"
    options: dict[str, Any] = json.loads(file.read_text("utf-8"))["options"]
    return options


def table(head: Sequence[str], rows: Rows, *forms: str) -> str:
    """Return Markdown; `forms` are the formats of the last columns, and None becomes a dash."""
    first = len(head) - len(forms)
    cells = [
        [
            *map(str, row[:first]),
            *("-" if n is None else format(n, f) for n, f in zip(row[first:], forms, strict=True)),
        ]
        for row in rows
    ]
    return Table(head, cells).markdown()


def over_all(record: dict[str, Any], contender: str) -> dict[str, Any]:
    """Return the row of a contender over all tasks."""
    rows = (row for row in record["summary"] if row["contender"] == contender)
    found: dict[str, Any] = next(row for row in rows if row["task"] in ALL)
    return found


def per_round(record: dict[str, Any], contender: str, count: str) -> float:
    """Return one of the `stats` counts per forward pass of the target."""
    mine = [one for one in record["records"] if one["contender"] == contender]
    total: int = sum(one["stats"][count] for one in mine)
    return total / sum(one["target_forwards"] for one in mine)


def falcon() -> str:
    """Return tree sizes, draft passes, speed, and tau of Falcon."""
    claimed = {name: row for target, name, *row in CLAIMS["falcon"]["ablation"]}
    eagle = CLAIMS["falcon"]["methods"][0]
    nodes, passes = CLAIMS["falcon"]["tree"]
    rows: Rows = [
        ("paper, Vicuna 7B: EAGLE", None, None, eagle[2], eagle[3]),
        ("Falcon, k = 2, CSGD, chain", None, None, *claimed["chain, CSGD"][:2]),
        ("Falcon, k = 2, tree", nodes, passes, *claimed["tree, no CSGD"][:2]),
        ("Falcon, k = 2, CSGD, tree", nodes, passes, *claimed["tree, CSGD"][:2]),
    ]
    chain, head = (
        'falcon:tree="chain",max_draft_tokens=4@smollm2-135m-falcon',
        "smollm2-135m-falcon",
    )
    newest = "48_nodes"
    contenders = [row["contender"] for row in load(f"{FALCON}_{newest}.json")["summary"]]
    best, whole = (
        next(name for name in contenders if f"max_nodes={count}@" in name) for count in (15, 48)
    )
    names = {
        "ours, SmolLM2-135M: k = 1, measured size": (newest, f"falcon@{head}"),
        "k = 1, best 15 of 48 nodes": (newest, best),
        "k = 1, all 48 nodes": (newest, whole),
        "k = 1, chain of 4": ("60_epyc", chain),
        "k = 2, CSGD, chain of 4": ("k2_epyc", f"{chain}-k2"),
        "k = 2, CSGD, the paper's tree": ("k2_epyc", f'falcon:tree="falcon-vicuna"@{head}-k2'),
    }
    for name, (record_name, contender) in names.items():
        record = load(f"{FALCON}_{record_name}.json")
        sizes = (per_round(record, contender, n) for n in ("drafted_tokens", "draft_forwards"))
        row = over_all(record, contender)
        # The others are from older engine versions, which does not affect tau.
        speed = row["ratio"] if record_name == newest else None
        rows.append((name, *sizes, speed, row["tau"]))
    head_row = ("", "draft tokens per round", "passes per round", "speed over plain", "tau")
    return table(head_row, rows, ".1f", ".1f", ".2f", ".2f")


def falcon_training() -> str:
    """Return the mean tau over seeds of trainings that differ in one setting."""
    found = load("falcon/smollm2_glancing_layers.json")["trainings"]
    rows: Rows = []
    for kind, taus in trainings.by_kind(found, "tau").items():
        one = next(training for name, training in found.items() if name.startswith(kind))
        shape, csgd = one["settings"]["shape"], one["settings"]["csgd"]
        learned = "learned" if csgd["learn_replaced"] else "not learned"
        glancing = "off" if csgd["schedule"] == "off" else f"falling, {learned}"
        spread = f"{min(taus):.3f} - {max(taus):.3f}"
        rows.append((f"{shape['num_layers']}", glancing, len(taus), spread, mean(taus)))
    return table(("attention layers", "CSGD", "seeds", "range", "tau"), rows, ".3f")


def disco() -> str:
    """Return speeds with heuristic, static, and DISCO draft lengths, and with the oracle."""
    claims = CLAIMS["disco"]
    rows: Rows = [
        (
            task,
            target / claims["heuristic"][task],
            target / claims["static_five"][task],
            *_captured(target / best, target / ours, target / oracle),
        )
        for task, target, best, ours, oracle in claims["latency"]
    ]
    speed = _total_ratios("disco/smollm2_baselines.json")
    shared = speed["draft:length_policy=heuristic"], speed["draft:max_draft_tokens=5"]
    static = _best_static(speed)
    kinds = {"acceptance_threshold=0.65,max_draft_tokens=5": "0.65, longest 5", "": "measured"}
    for options, kind in kinds.items():
        mine = speed[f"disco:{options}" if options else "disco"]
        rows.append((f"ours, {kind}", *shared, static, mine, mine / static, None, None))
    qwen = _total_ratios("disco/qwen_human_eval.json")
    shared = qwen["draft:length_policy=heuristic"], qwen["draft:max_draft_tokens=5"]
    static, mine = qwen["draft:max_draft_tokens=4"], qwen[f"disco:{TRANSFERRED}"]
    ratios = mine / static, qwen["oracle"] / static
    rows.append(("Qwen, HumanEval", *shared, static, mine, *ratios, None))
    # Both lengths were chosen by time on MBPP's training set.
    for task, record in (("HumanEval", "qwen_calibrated"), ("MBPP", "qwen_mbpp")):
        timed = _total_ratios(f"disco/{record}.json")
        static, mine = timed["draft:max_draft_tokens=2"], timed["disco"]
        row = f"Qwen, {task}, calibrated", None, None, static, mine, mine / static, None, None
        rows.append(row)
    for name, rules in _transferred().items():
        speeds = (rules[rule]["speed"] for rule in ("static", "classifier", "oracle"))
        rows.append((f"Qwen, {name}, estimated", None, None, *_captured(*speeds)))
    heads = ("heuristic", "static 5", "best static", "DISCO")
    ratios = ("DISCO / static", "oracle / static", "captured, %")
    return table(("data", *heads, *ratios), rows, *[".2f"] * 6, ".0f")


def _transferred() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the results of a classifier trained on MBPP's training set, by task and rule."""
    found: dict[str, dict[str, dict[str, Any]]] = {"MBPP": {}, "HumanEval": {}}
    names = {"mbpp": "MBPP", "human_eval": "HumanEval"}
    for row in load("disco/qwen_transfer.json")["rows"]:
        if row["judged"] in names:
            found[names[row["judged"]]][row["rule"]] = row
    return found


def _total_ratios(name: str) -> dict[str, float]:
    """Return the speedup over plain `generate()` by contender, without assistant and quotes."""
    rows = (row for row in load(name)["summary"] if row["task"] in ALL)
    return {
        row["contender"].split("@")[0].replace('"', ""): row["total_ratio"]
        for row in rows
        if "total_ratio" in row
    }


def _best_static(speed: dict[str, float]) -> float:
    return max(ratio for name, ratio in speed.items() if name.startswith("draft:max_draft_tokens"))


def _captured(static: float, mine: float, oracle: float) -> Sequence[float]:
    share = 100 * (mine - static) / (oracle - static)
    return static, mine, mine / static, oracle / static, share


def disco_f1() -> str:
    """Return the F1 scores for accepted tokens."""
    rows: Rows = [(name, static_f1, None, mine) for name, static_f1, mine in CLAIMS["disco"]["f1"]]
    rules = adapter("smollm2-135m-disco")["validation"]["rules"]
    fixed = {name: rule["accepted"]["f1"] for name, rule in rules.items()}
    found = load("disco/smollm2_oracle_lengths.json")["rules"]
    chosen = {name: rule["f1_accepted"] for name, rule in found.items()}
    for name, f1, mine in (
        ("ours, held-out answers, fixed", fixed, "disco"),
        ("ours, 60 prompts, chosen", chosen, "classifier"),
    ):
        static = max(value for rule, value in f1.items() if rule.startswith("static"))
        rows.append((name, *(100 * value for value in (static, f1["confidence"], f1[mine]))))
    for name, rules in _transferred().items():
        both = (100 * rules[rule]["f1_accepted"] for rule in ("confidence", "classifier"))
        rows.append((f"Qwen, {name}", None, *both))
    return table(("data", "best static length", "confidence", "DISCO"), rows, ".0f", ".0f", ".0f")


def sdsat() -> str:
    """Return speeds over plain generation and over the engine alone, by temperature and rule."""
    rows: Rows = [
        (f"paper, {name}", temperature, None, tuned / plain, None)
        for name, temperature, plain, tuned in CLAIMS["sdsat"]["speed"]
    ]
    for name, file, contender in (
        ("SmolLM2-135M", "full_table/smollm2_current.json", "sdsat@smollm2-135m-sdsat"),
        ("Qwen2.5-Coder-0.5B", "sdsat/qwen_human_eval.json", QWEN_SDSAT),
    ):
        mine, idle = (over_all(load(file), one) for one in (contender, "none"))
        ratio = mine["total_ratio"]
        rows.append((f"ours, {name}", 0, mine["tau"], ratio, ratio / idle["total_ratio"]))
    summary = load("sdsat/qwen_sampled.json")["summary"]
    for temperature in (0.2, 1):
        for rule, label in {"exact": "lossless", "lossy": "paper's rule"}.items():
            kind = [r for r in summary if (r["temperature"], r["rule"]) == (temperature, rule)]
            best = max(kind, key=lambda row: row["speed"])
            rows.append((f"Qwen, {label}", temperature, best["tau"], best["speed"], None))
    head = ("data", "temperature", "tau", "speed over plain", "over `none`")
    return table(head, rows, ".2f", ".2f", ".2f")


def sdsat_trainings() -> str:
    """Return the losses and acceptance of trainings, and which functions the models then solve."""
    metrics = {"pass@1, code": "own functions", "pass@1, HumanEval": "HumanEval"}
    rows: Rows = []
    for model, trained, tested in (
        ("SmolLM2", "smollm2_sdsat_trainings", "smollm2_sdsat_quality"),
        ("Qwen", "qwen_trainings", "qwen_quality"),
    ):
        found = load(f"sdsat/{trained}.json")["trainings"]
        results = load(f"sdsat/{tested}.json")["results"]
        solved = {Path(name).name: task_quality.shares(of) for name, of in results.items()}
        base = next(name for name in solved if name not in found)
        rows.append((f"{model}, base", None, None, None, *(solved[base][m] for m in metrics)))
        for name, one in found.items():
            settings, last = one["settings"], one["evaluations"][-1]
            # This mode does not change the model.
            if settings["mode"] == "embeddings":
                continue
            loss = settings["loss"] + (", infilling" if settings["infilling"] else "")
            quality = [solved[name][m] if name in solved else None for m in metrics]
            mode = f"{model}, `{settings['mode']}`"
            rows.append((mode, loss, last["accepted"], last.get("clean_loss"), *quality))
    head = ("model, mode", "loss", "accepted", "clean loss", *metrics.values())
    return table(head, rows, "", ".2f", ".3f", "", "")


def gsd() -> str:
    """Return chains, trees, and graphs with one pruning, depth, and exit rule."""
    chains = {row[0]: row[3] for row in CLAIMS["gsd"]["methods"] if row[1] == "SSD"}
    rows: Rows = [
        (f"paper, {task}", method, 100 * accepted, drafted / chains[task], merged, speed)
        for task, method, accepted, drafted, merged, speed in CLAIMS["gsd"]["methods"]
    ]
    record = load("gsd/qwen_sampled.json")
    for rule, label in {"exact": "lossless", "lossy": "paper's rule"}.items():
        summary = {row["method"]: row for row in record["summary"] if row["rule"] == rule}
        for method, row in summary.items():
            runs = [r for r in record["records"] if (r["method"], r["rule"]) == (method, rule)]
            merged = sum(run["counters"]["rounds_with_merged_accepted"] for run in runs)
            share = None if method == "SSD" else 100 * merged / sum(run["rounds"] for run in runs)
            drafted = row["drafted"] / summary["SSD"]["drafted"]
            accepted = 100 * row["accepted"]
            rows.append((f"ours, {label}", method, accepted, drafted, share, row["speed"]))
    head = ("data", "method", "accepted, %", "drafted", "merged, %", "speed")
    return table(head, rows, ".1f", ".2f", ".1f", ".2f")


def gsd_merging() -> str:
    """Return nodes, accepted tokens, and divergence by merge length at fixed thresholds."""
    summary = load("gsd/qwen_sweep.json")["summary"]
    swept = {
        row["merge_length"]: row
        for row in summary
        if (row["children"], row["min_probability"]) == (4, 0.1)
    }
    divergence = load("gsd/qwen_merge_divergence.json")["summary"]
    kl = {row["merge_length"]: row["mean_kl"] for row in divergence}
    claimed = CLAIMS["gsd"]["divergence"]
    rows: Rows = []
    for length in (None, *range(len(claimed))):
        row = swept.get(length)
        nodes = row and row["drafted"]
        saved = row and 100 * (1 - row["drafted"] / swept[None]["drafted"])
        merged = row and 100 * row["merged_accepted"]
        counts = (nodes, saved, row and row["tau"], merged)
        if length is None:
            rows.append(("none", *counts, None, None, None))
        else:
            relative = (kl[str(length)] / kl["0"], claimed[length] / claimed[0])
            rows.append((length, *counts, kl[str(length)], *relative))
    head = ("merge length", "nodes", "saved, %", "tau", "merged, %")
    relative = ("KL, nats", "KL, relative", "paper, relative")
    return table((*head, *relative), rows, ".0f", ".0f", ".2f", ".1f", ".3f", ".3f", ".3f")


def ems_sd() -> str:
    """Return the speed of unpadded inputs, unpadded KV cache, and both, over full padding."""
    records = {
        "ours, 128 new tokens": "ems_sd/smollm2_uncut.json",
        "ours, Qwen 0.5B, 128 new tokens": "ems_sd/qwen_uncut.json",
        "ours, 16 new tokens": "ems_sd/smollm2_decoding.json",
    }
    ours = {
        name: {row["batch_size"]: row for row in record["summary"]}
        for name, record in recorded(records).items()
    }
    rows: Rows = []
    for size, padded, inputs, keys, both in CLAIMS["ems_sd"]["halves"]:
        rows.append((size, "paper", keys / padded, inputs / padded, both / padded, None))
        for name, by_size in ours.items():
            if size in by_size:
                mine = by_size[size]["decoding_ratio"]
                modes = ("unpadded_kv", "unpadded_input", "unpadded")
                gains = (mine[mode] / mine["padded"] for mode in modes)
                rows.append((size, name, *gains, 100 * by_size[size]["padding_ratio"]))
    head = ("batch size", "", "keys and values", "inputs", "both", "padding ratio, %")
    return table(head, rows, ".2f", ".2f", ".2f", ".0f")


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        falcon,
        falcon_training,
        disco,
        disco_f1,
        sdsat,
        sdsat_trainings,
        gsd,
        gsd_merging,
        ems_sd,
    )
}


def written(page: str) -> str:
    """Return a page with regenerated tables."""
    return MARK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", page)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        path.write_text(written(path.read_text("utf-8")), encoding="utf-8")
