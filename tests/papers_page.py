"""docs/papers.md: the claims of the five papers beside our records, in the same metric.

Ours come from the records in examples/studies, the papers' from `paper_claims.json`, copied from
their tables; no figure of either is typed into the page. `python -m tests.papers_page` writes it;
tests/test_docs.py compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from examples.studies import trainings
from examples.studies.disco import ablation, few_tokens
from examples.studies.ems_sd import halves
from examples.studies.gsd import sweep
from examples.studies.sdsat import task_quality
from hf_spec.evaluation.bench.calibrate.disco import ForwardCounts, seconds_at_median_cost
from hf_spec.evaluation.bench.tables import Table

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "papers.md"
STUDIES = TESTS.parent / "examples" / "studies"
CLAIMS = json.loads((TESTS / "paper_claims.json").read_text("utf-8"))

TREES = "falcon/smollm2_falcon_60_epyc.json"
ABLATION = "falcon/smollm2_falcon_ablation.json"
GLANCING = "falcon/smollm2_falcon_glancing.json"
DRAFTS = "disco/smollm2_draft_methods.json"
LENGTHS = "disco/smollm2_lengths.json"
CALIBRATION = "disco/smollm2_calibration_24_prompts.json"
EARLIER_CALIBRATION = "disco/smollm2_calibration.json"
FEATURES_LEFT_OUT = "disco/smollm2_ablation.json"
FEW_TOKENS = "disco/smollm2_few_tokens.json"
SDSAT = "sdsat/smollm2_sdsat.json"
SDSAT_TRAININGS = "sdsat/smollm2_sdsat_trainings.json"
SDSAT_QUALITY = "sdsat/smollm2_sdsat_quality.json"
BATCHES = "ems_sd/smollm2_batches.json"
SWEEP = "gsd/smollm2_sweep.json"
GSD_SPEED = "gsd/smollm2_speed.json"
DECODING = "ems_sd/smollm2_decoding.json"
HALVES = "ems_sd/smollm2_halves.json"
MERGES = "gsd/smollm2_merge_divergence.json"

TEMPLATE = """# The five papers

Made by `python -m tests.papers_page` from the records in `examples/studies` and from the papers'
own tables (`tests/paper_claims.json`); a test compares it. Per paper: what is implemented, where
it differs, its claims beside our recorded figures in the same metric, and why they are what they
are.

Two things hold for all of them. Our target is SmolLM2-135M-Instruct in float32 on two cores of a
CPU; theirs have 2.7 to 70 billion parameters and run in half precision on a GPU. There a forward
over many tokens costs about what one over one does, and a drafter costs a small share of it; here
neither holds. And the ratio to plain `generate()` contains our packed weights: `none` is the
engine without drafts, where a record has it.

`tau` is accepted draft tokens per forward of the target; `alpha` is the share of all tokens that
were drafted. With one token of the target's own a forward, `alpha` is `tau / (1 + tau)`; Falcon's
own rows are within a point of that, those it gives for EAGLE not all (with Vicuna 7B it would be
{eagle_alpha} %).

## Falcon

{falcon_source}

Implemented: the head, with per-pair or recurrent LSTM (`--recurrent`), blocks of 1 to 4 tokens,
the relaxed causal mask in training, drafting and verification, the two published trees, CSGD by
paper or code, every option named (`hf_spec/methods/falcon/csgd.py`). Differs: factors on the LSTM's
inputs and outputs, a start from the target's own last layer, few tokens in the vocabulary, blocks
counted from the newest pair; sampling is lossless, and any batch size works. `--csgd steps` lets
the share of glanced inputs fall to nothing within any number of epochs, and `--no-learn-replaced`
leaves places that were given their own answers out of the loss; both are ours.

**The head that the examples use, `smollm2-135m-falcon`, has blocks of one token and was trained
without CSGD, which is EAGLE's case, not Falcon's; and it reads three earlier states of the target
as well, as EAGLE-3 does (`--fused`).** `smollm2-135m-falcon-k2` beside it is Falcon's:
k = 2, a recurrent LSTM, CSGD with a share that falls. On budgets that two cores allow it is behind
k = 1, as in the last table.

{falcon_methods}

{falcon_ablation}

Why: our heads saw {falcon_tokens} answer tokens in the ablation, the paper's {falcon_dialogues}
dialogues. There CSGD ran one epoch, so the share of replaced inputs stayed at its highest, where
more than half of all starts of blocks are given their own answers, and the loss scored those as
well. So it was repeated with the two options above: {glancing_texts} answers with whole prompts,
two epochs, everything else equal, judged on answers held back (one pass of the head; k = 1 drafts
one token in it):

{falcon_glancing}

The share that falls, without the replaced places, brings back most of what glancing loses with the
paper's schedule on so few steps, and is still behind none at all. A likely reason, not tested: on
this budget k = 2 has hardly learned to fetch the newest pair through attention.

## DISCO

{disco_source}

Implemented: classifier, its features, calibration of threshold and longest draft by latency,
transfer between tasks, hard and soft labels, the oracle, and the same classifier as a policy for
trees, graphs and heads. Differs: with neither of the two calibrated values given, measured time
decides where the classifier's probability is enough. Its features are computed over the tokens
that the draft model knows.

{disco_table}

The paper's best static length is the one that was tuned on other texts;
{disco_static_five}

Rows with forwards at one price count forwards: every one of the target at the median of all ways,
every drafted level at the median of its own way, DISCO's classifier included. The first run of ours
is from before layers ran as programs, the second is today's engine, one thread beside other work.
There a forward of the target costs half as much, so a draft's price weighs twice; and every node
that is sent costs something, which one price leaves out:

{disco_forwards}

DISCO needs fewer forwards of the target than the best static length and pays for it with larger
ones and more drafts, so nothing is left of its gain, and little of the oracle's. Without calibrated
values, going by measured time, it stopped too early.

F1 of predicting acceptance, on held-back prompts, in per cent (of our static lengths the best):

{disco_f1}

Threshold and longest draft on {grid_prompts} prompts that training held back, one thread,
{grid_tokens} new tokens; speed over the best static length, medians:

{disco_grid}

The same, with forwards at one price:

{disco_grid_counted}

Time has {disco_best} in front, forwards {disco_best_counted};
an earlier calibration on {earlier_prompts} prompts and two threads had {disco_best_earlier}. Each
has a pair a few per cent in front, and each another one: twenty pairs differ by less than their
spread over prompts. The shipped adapter has those that time has in front: {disco_shipped}.

Without one of its features, and with labels that are the probability of acceptance (soft, the
paper's total variation distance) or whether the likeliest token is right (hard); F1 at the
training's threshold, and how often an accepted token is ranked over a refused one, on the held-back
part of {left_out_prompts} answers, means of {left_out_seeds} seeds:

{disco_left_out}

A level drafted over all tokens, and over those that the draft model knows, one thread (sampled at a
temperature of 0.7 and a top-p of 0.9; chains drawn at random take other random numbers):

{disco_cost}

Why: what a classifier can gain is what the oracle gains, and that is smaller here. The paper's
drafts are accepted for {disco_oracle} tokens in a row (oracle, table 2 there), ours for
{our_oracle}.

## SDSAT

{sdsat_source}

Implemented: both losses, identical and diverse tokens, infilling, the published loop and trees,
the paper's sampling rule (`lossy`). Differs: two modes that do not change the target (`gated`,
`embeddings`), windows as branches of the clean text, a fused loop, lossless sampling.

{sdsat_table}

Why: the paper trains every weight of models of 7B and 13B on code for {sdsat_steps} steps of 4
million tokens and measures code; ours is a LoRA on the adaptive positions of a 135M model, trained
with starts at a share of {our_share} of the positions (the paper: {sdsat_share}), measured on six
tasks.

Trainings at the paper's share, on {sdsat_answers} answers each, one epoch: drafts accepted a
verification on answers held back, and what the model says afterwards to problems that can be right
or wrong (tables 1 to 3 there; the modes that leave the model's answers as they are have the base's
figures):

{sdsat_trainings}

Sixteen problems of each kind tell large differences alone. The base solves none of the word
problems, so these cannot get worse; several of the functions gained differ from the base's in how
the answer ends alone, as in the answers that were learned. The basic loss has the most drafts
accepted and the fewest functions right: it trains the clean text behind adaptive tokens, too, and
its programs show it. That is why the paper improves on it (section 2.2 and figure 5 there).
Infilling here is the paper's, half of the code in either order, with spare tokens as markers, since
this tokenizer has none; it is a fifth of these texts, and one epoch shows neither gain nor harm.

## GSD

{gsd_source}

Implemented: the graph with merging, both prunings, revived leaves, unmerging beyond the drafted
levels, repair of the draft model's keys and values, the paper's sampling rule (`lossy`). Differs:
no cycles, several merge edges per node, the likeliest paths are unmerged first, lossless
sampling, {gsd_default} nodes sent where the length is not measured (the paper's code: about
{gsd_sent}).

{gsd_table}

The same with other thresholds and more nodes sent, counted on {sweep_prompts} prompts
(`max_nodes` is what is sent at most):

{gsd_sweep}

What these settings are worth in time, on {speed_prompts} prompts, 32 new tokens each, ratios to
plain `generate()`: with `max_nodes="auto"`, the default, where measured time decides how much is
drafted and sent, and with fixed sizes.

{gsd_speed}

What merging costs, the mean Kullback-Leibler divergence of table 5 (three children there, four
here; the paper's unit is not given, so compare the falls):

{gsd_divergence}

Why: with the paper's thresholds a draft model this small branches little, so there is little to
merge and to choose from; with less pruning and more nodes tau rises, for the most part without
merging. On a CPU that does not pay: drafting so many nodes and sending a hundred costs more than
the tokens bring, and where measured time decides the thresholds make no difference beyond the
spread, so the defaults stay. See [GSD](gsd.md).

## EMS-SD

{ems_source}

Implemented: both halves, for every strategy, in one packed forward; continuous batching. Differs:
samples end by themselves, sampling is lossless.

{ems_lookup}

{ems_draft}

With a draft model the paper unpads keys and values alone, since all rows draft equally many tokens;
ours that have ended draft none. Our lookup copies from the answer too, the paper's from the prompt
alone (`LookupConfig(prompt_only=True)`).

The tables above count our prompts, which have different lengths. Decoding alone, with prompts of
one length, so that none is padded: the speed of each half, and of both, over everything padded
({ems_extent}):

{ems_halves}

What padding on the left costs plain `generate()` is apart: its own speed after 64 more places, over
that without them:

{ems_left}

One verification by itself, milliseconds: half of the rows send seven drafted tokens, the others
none; with keys and values padded, those of all rows but one have a gap of so many places:

{ems_forward}

Why the other half leads here: on this CPU a forward takes the longer the more tokens it runs, and
padded inputs run {ems_tokens}; a gap in keys and values is
looked over by attention alone, a small part of a model of this size. On the paper's A100 five
tokens a row take {ems_paper_forward} times as long as one, at 16 rows, so there what padding runs
costs little and what it stores remains. Our rows also accept fewer tokens, so gaps grow slowly
(`examples/studies/ems_sd/README.md`).
"""


def load(name: str) -> dict[str, Any]:
    """A record."""
    found: dict[str, Any] = json.loads((STUDIES / name).read_text("utf-8"))
    return found


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """What a record says of each contender over all tasks."""
    return {row["contender"]: row for row in load(name)["summary"] if row["task"] in (None, "all")}


def drafted_share(row: dict[str, Any]) -> float:
    """alpha, in per cent: all tokens but one a forward are drafted."""
    return 100 * (1 - 1 / row["tokens_per_forward"])


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], *forms: str) -> str:
    """Markdown; `forms` are those of the numbers, None is a dash."""
    first = len(head) - len(forms)
    cells = [
        [
            *map(str, row[:first]),
            *("-" if n is None else format(n, f) for n, f in zip(row[first:], forms, strict=True)),
        ]
        for row in rows
    ]
    return Table(head, cells).markdown()


def named(contender: str) -> str:
    """A contender as the options that make it differ, without the list of a tree."""
    method, _, options = contender.partition("@")[0].partition(":")
    kept = [part for part in options.split(",") if "=" in part and "[" not in part]
    return ", ".join([f"`{method}`", *(f"`{part}`" for part in kept)])


def falcon_methods() -> str:
    ours = [
        ("ours, SmolLM2-135M", named(name), row["ratio"], row["tau"], drafted_share(row))
        for name, row in rows_of(TREES).items()
        if "tau" in row
    ]
    head = ("target", "drafter", "speed", "tau", "alpha, %")
    return table(head, [*CLAIMS["falcon"]["methods"], *ours], ".2f", ".2f", ".1f")


def falcon_ablation() -> str:
    ours = []
    for name, row in rows_of(ABLATION).items():
        if "tau" not in row:
            continue
        head = name.partition("@")[2]
        shape = "chain" if "chain" in name else "tree"
        glanced = "no CSGD" if head.endswith("off") else "CSGD"
        said = f"{shape}, {glanced}, k = {head[1]}"
        ours.append(("ours, SmolLM2-135M", said, row["ratio"], row["tau"], drafted_share(row)))
    head = ("target", "ablation", "speed", "tau", "alpha, %")
    return table(head, [*CLAIMS["falcon"]["ablation"], *ours], ".2f", ".2f", ".1f")


def falcon_glancing() -> str:
    """Trainings that differ in one thing; over their seeds means, least and most."""
    found = load(GLANCING)["trainings"]
    taus, alphas = (trainings.by_kind(found, figure) for figure in ("tau", "alpha"))
    rows = []
    for kind, seeds in taus.items():
        one = next(training for name, training in found.items() if name.startswith(kind))
        shape, csgd = one["settings"]["shape"], one["settings"]["csgd"]
        glanced = csgd["schedule"]
        if glanced != "off" and not csgd["learn_replaced"]:
            glanced += ", replaced places not learned"
        recurrent = "recurrent" if shape["recurrent"] else "per pair"
        spread = f"{min(seeds):.3f} - {max(seeds):.3f}" if len(seeds) > 1 else None
        figures = mean(seeds), spread, 100 * mean(alphas[kind])
        rows.append((f"k = {shape['block_size']}", recurrent, glanced, len(seeds), *figures))
    head = ("block", "LSTM", "share of CSGD", "seeds", "tau", "least - most", "alpha, %")
    return table(head, rows, ".3f", "", ".1f")


def falcon_tokens() -> str:
    """How many answer tokens the ablation's heads saw."""
    record = load("falcon/smollm2_falcon_training.json")
    seen = record["ablation: block size 2, CSGD"]["evaluations"][-1]["answer_tokens"]
    return f"{seen / 1e6:.2f} million"


def shares(static: float, disco: float, oracle: float) -> tuple[float, float, float]:
    """Speed of DISCO and the oracle over the best static length, and the share captured, in %."""
    return disco / static, oracle / static, 100 * (disco - static) / (oracle - static)


def disco_table() -> str:
    rows: list[Sequence[Any]] = [
        (task, target / best, target / disco, *shares(1 / best, 1 / disco, 1 / oracle))
        for task, target, best, disco, oracle in CLAIMS["disco"]["latency"]
    ]
    for record in (DRAFTS, LENGTHS):
        rows += disco_rows(record)
    head = ("data", "best static", "DISCO", "DISCO / static", "oracle / static", "captured, %")
    return table(head, rows, ".2f", ".2f", ".2f", ".2f", ".0f")


def disco_rows(record: str) -> list[Sequence[Any]]:
    """Of a record with an oracle, rows for every way of DISCO: in total, and prompt by prompt."""
    prompts, rows = by_prompt_of(record), list[Sequence[Any]]()
    speeds = {name: total_ratio(prompts, name) for name in prompts[0]}
    static = {n: s for n, s in speeds.items() if n.startswith("draft") and "policy" not in n}
    best = max(static, key=lambda name: static[name])

    def faster(name: str, than: str) -> float:
        return median(seconds[than] / seconds[name] for seconds in prompts)

    for name, speed in speeds.items():
        # A classifier that was trained on code alone is of another question.
        if not name.startswith("disco") or name.endswith("-code"):
            continue
        said = f"ours, {len(prompts)} prompts, {named(name)} (best: {named(best)})"
        total = shares(static[best], speed, speeds["oracle"])
        paired = shares(1, faster(name, best), faster("oracle", best))
        rows.append((f"{said}, in total", static[best], speed, *total))
        ratios = faster(best, "plain"), faster(name, "plain")
        rows.append((f"{said}, medians of prompts", *ratios, *paired))
        counted = shares(*(1 / priced(record, one) for one in (best, name, "oracle")))
        rows.append((f"{said}, forwards at one price", None, None, *counted))
    return rows


def disco_forwards() -> str:
    """What every way spent on forwards, in the record of the lengths."""
    rows = []
    kinds = ("draft", "disco", "oracle")
    records = [one for one in load(LENGTHS)["records"] if one["contender"].startswith(kinds)]
    for name in dict.fromkeys(one["contender"] for one in records):
        mine = [one for one in records if one["contender"] == name]
        spent: list[float] = []
        for count, seconds in (
            (sum(one["target_forwards"] for one in mine), "verify_seconds"),
            (sum(one["stats"]["draft_forwards"] for one in mine), "draft_seconds"),
        ):
            spent += [count, 1000 * sum(one["stats"][seconds] for one in mine) / count]
        rows.append((named(name), *spent))
    head = ("ours", "target forwards", "ms each", "drafted levels", "ms each")
    return table(head, rows, ",", ".1f", ",", ".1f")


def disco_static_five() -> str:
    """Where the paper's fixed length of five was faster than its tuned one."""
    faster = [
        f"on {task} its length of five was faster still, DISCO {five / disco:.2f} times as fast."
        for task, _, best, disco, _ in CLAIMS["disco"]["latency"]
        if (five := CLAIMS["disco"]["static_five"][task]) < best
    ]
    return " ".join(faster)


def eagle_alpha() -> str:
    """What the tau of the paper's EAGLE says of alpha."""
    tau = next(row[3] for row in CLAIMS["falcon"]["methods"] if row[1] == "EAGLE")
    return f"{100 * tau / (1 + tau):.1f}"


def priced(record: str, name: str) -> float:
    """Seconds of a way's forwards: the target's at what all ways pay, a level at what it pays."""
    records = [one for one in load(record)["records"] if one["contender"] not in ("plain", "none")]
    spent = [
        ForwardCounts(
            one["contender"],
            one["target_forwards"],
            one["stats"]["verify_seconds"],
            one["stats"]["draft_forwards"],
            one["stats"]["draft_seconds"],
        )
        for one in records
    ]
    costs = zip(records, seconds_at_median_cost(spent), strict=True)
    return sum(cost for one, cost in costs if one["contender"] == name)


def disco_grid(figure: str) -> str:
    """Speed of every pair of threshold and longest draft over the best static length."""
    found = load(CALIBRATION)["calibration"]
    ways = found["table"]
    static = max(row[figure] for name, row in ways.items() if name.startswith("static"))
    rows = [
        (
            threshold,
            *(
                ways[f"threshold {threshold}, longest {n}"][figure] / static
                for n in found["longest"]
            ),
        )
        for threshold in found["thresholds"]
    ]
    head = ("threshold", *(f"longest {n}" for n in found["longest"]))
    return table(head, rows, *[".2f"] * len(found["longest"]))


def disco_best(figure: str, record: str = CALIBRATION) -> str:
    """The pair that a figure has in front, and by how much over the best static length."""
    table = load(record)["calibration"]["table"]
    front = {
        kind: max((row[figure], name) for name, row in table.items() if name.startswith(kind))
        for kind in ("threshold", "static")
    }
    pair = front["threshold"][1].removeprefix("threshold ").replace(", longest", " and")
    return f"{pair} ({front['threshold'][0] / front['static'][0]:.2f})"


def disco_shipped() -> str:
    """Threshold and longest draft of the shipped adapter."""
    found = adapter("disco")
    return f"{found['threshold']} and {found['max_draft_tokens']}"


def sdsat_table() -> str:
    rows: list[Sequence[Any]] = [
        (task, None, tuned / plain, None, None) for task, plain, tuned in CLAIMS["sdsat"]["speed"]
    ]
    found = rows_of(SDSAT)
    idle = found["none"]["total_ratio"]
    for name, row in found.items():
        if name.startswith("sdsat"):
            ratio = row["total_ratio"]
            said = f"ours, {named(name)}"
            rows.append((said, row["tau"], ratio, ratio / idle, drafted_share(row)))
    head = ("data", "tau", "speed", "over the engine alone", "alpha, %")
    return table(head, rows, ".2f", ".2f", ".2f", ".1f")


def sdsat_trainings() -> str:
    """Each training, and the quality of the models that it changed."""
    judged = {Path(name).name: found for name, found in load(SDSAT_QUALITY)["results"].items()}
    base = next(name for name in judged if name not in load(SDSAT_TRAININGS)["trainings"])
    rows: list[Sequence[Any]] = [("the base", None, None, *task_quality.shares(judged[base]))]
    for name, one in load(SDSAT_TRAININGS)["trainings"].items():
        settings, last = one["settings"], one["evaluations"][-1]
        said = settings["loss"] + (", infilling" if settings["infilling"] else "")
        quality = task_quality.shares(judged[name]) if name in judged else (None, None)
        rows.append((f"`{settings['mode']}`", said, last["accepted"], *quality))
    head = ("mode", "loss", "accepted", *task_quality.SHARES)
    return table(head, rows, "", ".2f", "", "")


def gsd_table() -> str:
    rows: list[Sequence[Any]] = []
    of_chain = {row[0]: row[3] for row in CLAIMS["gsd"]["methods"] if row[1] == "SSD"}
    for task, method, accepted, drafted, merged, speed in CLAIMS["gsd"]["methods"]:
        rows.append((task, method, 100 * accepted, drafted / of_chain[task], merged, speed))
    found, records = rows_of(DRAFTS), load(DRAFTS)["records"]
    ours = {
        "SSD": "draft@smollm2-135m-draft",
        "TSD": "tree:max_draft_tokens=4,children=4,expanded_per_level=64@smollm2-135m-draft",
        "GSD": "gsd@smollm2-135m-draft",
    }
    nodes, merged_rounds = {}, {}
    for method, name in ours.items():
        counts = [one["stats"]["counters"] for one in records if one["contender"] == name]
        nodes[method] = sum(one["draft_nodes"] for one in counts)
        rounds = sum(one["rounds"] for one in counts)
        merged_rounds[method] = sum(one["rounds_with_merged_accepted"] for one in counts) / rounds
    for method, name in ours.items():
        row = found[name]
        merged = None if method == "SSD" else 100 * merged_rounds[method]
        ratio = nodes[method] / nodes["SSD"]
        rows.append(("ours", method, drafted_share(row), ratio, merged, row["total_ratio"]))
    head = ("data", "method", "accepted, %", "drafted / SSD", "rounds with merged, %", "speed")
    return table(head, rows, ".1f", ".2f", ".1f", ".2f")


def gsd_speed() -> str:
    """What the thresholds and nodes sent are worth in time, with and without measured lengths."""
    records, prompts = load(GSD_SPEED)["records"], by_prompt_of(GSD_SPEED)
    rows = []
    for name in list(prompts[0])[1:]:
        ratios = [seconds["plain"] / seconds[name] for seconds in prompts]
        low, _, _, high = quantiles(ratios, n=5)
        same = sum(one["identical"] for one in records if one["contender"] == name)
        tau = rows_of(GSD_SPEED)[name]["tau"]
        identical = f"{same} of {len(prompts)}"
        total = total_ratio(prompts, name)
        rows.append((named(name), identical, median(ratios), low, high, total, tau))
    head = ("strategy", "identical", "median", "p20", "p80", "total", "tau")
    return table(head, rows, ".2f", ".2f", ".2f", ".2f", ".2f")


def by_prompt_of(record: str) -> list[dict[str, float]]:
    """Per prompt the seconds of each contender; where it was timed again, of the first time."""
    found: dict[str, dict[str, float]] = {}
    for one in load(record)["records"]:
        found.setdefault(one["prompt"], {}).setdefault(one["contender"], one["seconds"])
    return list(found.values())


def total_ratio(prompts: Sequence[dict[str, float]], name: str, than: str = "plain") -> float:
    """Speed over another's, by the seconds of all prompts."""
    return sum(one[than] for one in prompts) / sum(one[name] for one in prompts)


def ems_table(method: str) -> str:
    keys_alone = {size: keys for size, _, _, keys, _ in CLAIMS["ems_sd"]["halves"]}
    rows: list[Sequence[Any]] = []
    for size, plain, padded, unpadded in CLAIMS["ems_sd"][method]:
        speeds = padded / plain, keys_alone[size] / plain, unpadded / plain
        if method == "draft":
            speeds = padded / plain, unpadded / plain, None
        rows.append(("paper", size, *speeds, unpadded / padded))
    for row in load(BATCHES)["summary"]:
        if row["method"] == method:
            ratio = row["ratio"]
            speeds = ratio["padded"], ratio["unpadded_kv"], ratio["unpadded"]
            rows.append(("ours", row["batch_size"], *speeds, speeds[2] / speeds[0]))
    kinds = ("padded", "unpadded keys and values", "all unpadded", "the last / padded")
    return table((f"drafts: {method}", "batch size", *kinds), rows, *[".2f"] * 4)


def ems_halves() -> str:
    """Speed over everything padded, decoding alone: of each half, and of both."""
    rows: list[Sequence[Any]] = []
    for size, padded, inputs, keys, both in CLAIMS["ems_sd"]["halves"]:
        rows.append(("paper", size, inputs / padded, keys / padded, both / padded))
    for row in load(DECODING)["summary"]:
        speeds = row["decoding_ratio"]
        gains = (
            speeds[mode] / speeds["padded"]
            for mode in ("unpadded_input", "unpadded_kv", "unpadded")
        )
        rows.append(("ours", row["batch_size"], *gains))
    head = ("drafts: lookup", "batch size", "unpadded inputs", "unpadded keys and values", "both")
    return table(head, rows, ".2f", ".2f", ".2f")


def ems_left() -> str:
    """What padding on the left costs plain generate, by its speed with and without."""
    rows = [
        (row["batch_size"], row["ratio"]["left_padded"], row["decoding_ratio"]["left_padded"])
        for row in load(DECODING)["summary"]
    ]
    return table(("batch size", "prompts included", "decoding alone"), rows, ".2f", ".2f")


def ems_tokens() -> str:
    """Tokens run per new one in the largest batches."""
    row = max(load(DECODING)["summary"], key=lambda row: row["batch_size"])
    counts = row["decoding_tokens"]
    return (
        f"{counts['padded']:.1f} for each new one at {row['batch_size']} rows, unpadded ones "
        f"{counts['unpadded']:.1f}"
    )


def ems_extent() -> str:
    """How much the decoding record holds."""
    record = load(DECODING)
    runs = {(one["batch_size"], one["batch"], one["repeat"]) for one in record["records"]}
    counts = {size: sum(run[0] == size for run in runs) for size, *_ in sorted(runs)}
    said = ", ".join(f"{count} of {size}" for size, count in counts.items())
    tokens = record["extent"]
    clock = "processor time, one thread; " if record.get("processor_time") else ""
    return (
        f"prompts of {tokens['prompt_tokens']} tokens, {tokens['new_tokens']} new ones a row; "
        f"{clock}timings of batches by rows: {said}"
    )


def disco_f1() -> str:
    rules = adapter("disco")["validation"]["rules"]
    f1 = {name: 100 * rule["accepted"]["f1"] for name, rule in rules.items()}
    static = max(value for name, value in f1.items() if name.startswith("static"))
    rows = [*CLAIMS["disco"]["f1"], ("ours, six tasks", static, f1["disco"])]
    return table(("data", "static length", "DISCO"), rows, ".0f", ".0f")


def disco_oracle() -> str:
    lengths = CLAIMS["disco"]["oracle_lengths"]
    return f"{min(lengths):g} to {max(lengths):g}"


def gsd_divergence() -> str:
    found = {row["merge_length"]: row["mean_kl"] for row in load(MERGES)["summary"]}
    claimed = CLAIMS["gsd"]["divergence"]
    rows = [
        (length, kl, found[str(length)], kl / claimed[0], found[str(length)] / found["0"])
        for length, kl in enumerate(claimed)
    ]
    head = ("merge_length", "paper", "ours, nats", "paper, by the first", "ours, by the first")
    return table(head, rows, ".2e", ".3g", ".3f", ".3f")


def one_of(record: str) -> dict[str, Any]:
    """The settings of the first of some trainings."""
    settings: dict[str, Any] = next(iter(load(record)["trainings"].values()))["settings"]
    return settings


def adapter(method: str) -> dict[str, Any]:
    """The options of a shipped adapter."""
    file = STUDIES.parent / "adapters" / f"smollm2-135m-{method}" / "adapter_config.json"
    options: dict[str, Any] = json.loads(file.read_text("utf-8"))["options"]
    return options


def page() -> str:
    """The whole page."""
    records = load(SWEEP)["records"]
    parts: dict[str, Callable[[], str]] = {
        "eagle_alpha": eagle_alpha,
        "falcon_methods": falcon_methods,
        "falcon_ablation": falcon_ablation,
        "falcon_tokens": falcon_tokens,
        "falcon_glancing": falcon_glancing,
        "glancing_texts": lambda: str(one_of(GLANCING)["texts"]),
        "disco_table": disco_table,
        "falcon_dialogues": lambda: f"{CLAIMS['falcon']['dialogues']:,}",
        "disco_static_five": disco_static_five,
        "disco_forwards": disco_forwards,
        "disco_f1": disco_f1,
        "disco_grid": lambda: disco_grid("ratio"),
        "disco_grid_counted": lambda: disco_grid("ratio_at_one_price"),
        "grid_tokens": lambda: str(load(CALIBRATION)["calibration"]["new_tokens"]),
        "disco_best": lambda: disco_best("ratio"),
        "disco_best_counted": lambda: disco_best("ratio_at_one_price"),
        "disco_shipped": disco_shipped,
        "disco_best_earlier": lambda: disco_best("ratio", EARLIER_CALIBRATION),
        "earlier_prompts": lambda: str(len(load(EARLIER_CALIBRATION)["calibration"]["prompts"])),
        "disco_left_out": lambda: ablation.table(load(FEATURES_LEFT_OUT)["rows"]),
        "left_out_prompts": lambda: str(load(FEATURES_LEFT_OUT)["prompts"]),
        "left_out_seeds": lambda: str(len({r["seed"] for r in load(FEATURES_LEFT_OUT)["rows"]})),
        "disco_cost": lambda: few_tokens.table(load(FEW_TOKENS)["summary"]),
        "grid_prompts": lambda: str(len(load(CALIBRATION)["calibration"]["prompts"])),
        "disco_oracle": disco_oracle,
        "our_oracle": lambda: f"{rows_of(DRAFTS)['oracle']['tau']:.2f}",
        "sdsat_steps": lambda: f"{CLAIMS['sdsat']['steps']:,}",
        "sdsat_share": lambda: str(CLAIMS["sdsat"]["start_share"]),
        "our_share": lambda: str(adapter("sdsat")["training"]["start_share"]),
        "gsd_sent": lambda: str(CLAIMS["gsd"]["nodes_sent"]),
        "gsd_divergence": gsd_divergence,
        "sdsat_table": sdsat_table,
        "sdsat_trainings": sdsat_trainings,
        "sdsat_answers": lambda: str(one_of(SDSAT_TRAININGS)["examples"]),
        "gsd_table": gsd_table,
        "gsd_sweep": lambda: sweep.table(sweep.summary(records)),
        "gsd_speed": gsd_speed,
        "speed_prompts": lambda: str(len({one["prompt"] for one in load(GSD_SPEED)["records"]})),
        "gsd_default": lambda: str(sweep.GsdConfig.usual["max_nodes"]),
        "sweep_prompts": lambda: str(len({one["prompt"] for one in records})),
        "ems_lookup": lambda: ems_table("lookup"),
        "ems_draft": lambda: ems_table("draft"),
        "ems_halves": ems_halves,
        "ems_left": ems_left,
        "ems_forward": lambda: halves.table(load(HALVES)["summary"]),
        "ems_extent": ems_extent,
        "ems_tokens": ems_tokens,
        "ems_paper_forward": lambda: format(CLAIMS["ems_sd"]["five_tokens_to_one"], ".2f"),
    }
    sources = {
        f"{name.removesuffix('_sd')}_source": claims["source"] + "."
        for name, claims in CLAIMS.items()
    }
    return TEMPLATE.format(**{name: part() for name, part in parts.items()}, **sources)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
