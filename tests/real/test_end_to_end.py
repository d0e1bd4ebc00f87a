"""The workflows of the README and the docs, run from the wheel as a new user would run them.

Commands run in a new environment, with the package installed from its wheel, and in an empty
folder. Every generated text must equal that of plain `generate()` in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_spec.adapters.folder import load_adapter
from hf_spec.common.small_models import smollm2_135m_instruct
from hf_spec.methods.loading import strategy_of
from tests.adapters.local_hub import LocalHub, local_hub
from tests.installed import ROOT, User

pytestmark = [pytest.mark.real, pytest.mark.full]

# test_gemma3.py tests the adapters for Gemma.
ADAPTERS = sorted((ROOT / "examples" / "adapters").glob("smollm2-*"))
PROMPT = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"
NEW_TOKENS = 16
TOKEN = "hf_local"
HUB_NAME = "me/my-head"
WORDS = ("sun", "moon", "rain", "wind", "snow", "tree", "river", "bird")


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    with local_hub(TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def user(programs: Path, hub: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    home = tmp_path_factory.mktemp("home")
    variables = {
        # On the CPU, float32 gives the same tokens for any order of summation.
        "CUDA_VISIBLE_DEVICES": "",
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    user = User(programs, home, variables)
    with user.forking(tmp_path_factory.mktemp("streams")):
        yield user


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2_135m_instruct()


@pytest.fixture(scope="module")
def plain(smollm2: tuple[Any, Any]) -> str:
    """Return plain `generate()`'s text after the prompt."""
    target, tokenizer = smollm2
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


@pytest.fixture(scope="module")
def prompts(user: User) -> Path:
    """Write 40 short prompts; training holds some of them out."""
    path = user.home / "prompts.jsonl"
    rows = [
        {"id": f"p{n}", "task": "words", "turns": [f"Say {WORDS[n % len(WORDS)]} {n} times."]}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def answers(user: User, model: Path, prompts: Path) -> Path:
    path = user.home / "answers.jsonl"
    few = ("--max-new-tokens", 6, "--batch-size", 40, "--dtype", "float32")
    user.hf_spec("train", "responses", model, "--prompts", prompts, "--out", path, *few)
    return path


@pytest.fixture(scope="module")
def head(user: User, model: Path, answers: Path) -> Path:
    """Train a Falcon head on the answers and calibrate its tree on this machine."""
    path = user.home / "my-head"
    small = ("--block-size", 1, "--vocab-size", 512, "--batch-tokens", 256, "--dtype", "float32")
    user.hf_spec("train", "falcon", model, "--responses", answers, "--out", path, *small)
    tree = ("--depth", 2, "--num-ranks", 2, "--max-nodes", 4, "--drafted-nodes", 4)
    runs = ("--max-answers", 4, "--generations", 1, "--max-new-tokens", 4, "--repeats", 1)
    where = (model, "--adapter", path, "--responses", answers)
    user.hf_spec("calibrate", "falcon", *where, *tree, *runs)
    return path


@pytest.fixture(scope="module")
def results(user: User, model: Path, head: Path, prompts: Path) -> Path:
    path = user.home / "results.json"
    what = ("--strategy", f"falcon@{head.name}", "--prompts", prompts, "--no-baselines")
    few = ("--per-task", 1, "--max-new-tokens", 8, "--repeats", 1)
    table = user.hf_spec("bench", model, *what, *few, "--out", path)
    assert "falcon" in table
    return path


@pytest.fixture(scope="module")
def pushed(user: User, hub: LocalHub, head: Path, results: Path) -> str:
    """Push the head to the Hub with a model card that has its benchmark results."""
    user.hf_spec("card", head.name, "--results", results, "--license", "apache-2.0")
    address = user.hf_spec("push", head.name, HUB_NAME)
    assert address.startswith(f"{hub.url}/{HUB_NAME}/commit/")
    return HUB_NAME


def generate(user: User, model: Path, strategy: str) -> dict[str, Any]:
    options = ("--raw", "--max-new-tokens", NEW_TOKENS, "--json", "--strategy", strategy)
    return json.loads(user.hf_spec("generate", model, PROMPT, *options))


def test_the_demo(user: User) -> None:
    shown = user.run("hf-spec", "demo", "--repeats", 1, "--max-new-tokens", 8)
    # The wheel has no trained head; the rows are plain, none, lookup and auto.
    assert "falcon is left out" in shown.stdout
    assert shown.stdout.count("4 of 4") == 4
    # There is no progress output if the output is a pipe.
    assert shown.stderr == ""
    assert "\r" not in shown.stdout


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda path: path.name)
def test_the_shipped_adapters(user: User, model: Path, plain: str, adapter: Path) -> None:
    found = generate(user, model, f"{strategy_of(str(adapter))}@{adapter}")
    assert found["text"] == plain
    assert found["stats"]["drafted_tokens"] > 0


def test_a_trained_adapter_is_whole(user: User, head: Path) -> None:
    options = load_adapter(head, "falcon").options
    assert options["training"]["texts"] > 0
    assert options["calibration"]["choices"]
    assert (head / "training" / "run.json").is_file()
    assert not list(user.home.rglob("*.part"))


def test_verify(user: User, model: Path, head: Path, prompts: Path) -> None:
    # The head was trained on the first answer, and lookup finds the second in its prompt.
    known = prompts.read_text().splitlines()[0]
    copied = {"id": "c", "task": "copy", "turns": ["Repeat: red blue, red blue, red blue."]}
    mixed = user.home / "mixed.jsonl"
    mixed.write_text(f"{known}\n{json.dumps(copied)}\n")
    # Static lengths: on a busy machine, measured ones may be zero and verify nothing.
    fixed = (
        "lookup:max_draft_tokens=5",
        f'falcon:length_policy="static",max_nodes=null@{head.name}',
    )
    what = ("--strategy", fixed[0], "--strategy", fixed[1], "--prompts", mixed)
    few = ("--max-new-tokens", 24, "--sampled-prompts", 0, "--out", "report.json")
    page = user.hf_spec("verify", model, *what, *few)
    assert page.count("passed") == 2
    report = json.loads((user.home / "report.json").read_text())
    assert report["passed"]
    assert len(report["strategies"]) == 2


def test_verify_sampling(user: User, model: Path, prompts: Path) -> None:
    """The target is its own draft model, so some drafted tokens are always accepted."""
    drafts = f"draft:max_draft_tokens=2@{model}"
    what = ("--strategy", drafts, "--prompts", prompts, "--per-task", 1)
    page = user.hf_spec("verify", model, *what, "--max-new-tokens", 4, "--draws", 20)
    assert "passed" in page
    assert "sampling: 20 draws" in page


def test_the_card_has_the_figures(hub: LocalHub, pushed: str) -> None:
    repository = hub.repositories[pushed]
    card = repository.commits[repository.branches["main"]]["README.md"].decode()
    assert "library_name: hf_spec" in card
    assert "license: apache-2.0" in card
    assert "| `falcon" in card


def test_the_pushed_adapter_by_its_name(user: User, model: Path, pushed: str, plain: str) -> None:
    found = generate(user, model, f"falcon@{pushed}")
    assert found["text"] == plain
    assert found["stats"]["drafted_tokens"] > 0
    options = ("--raw", "--max-new-tokens", NEW_TOKENS, "--assistant", pushed)
    assert user.hf_spec("generate", model, PROMPT, *options) == plain + "\n"


def test_the_pushed_adapter_without_an_import(
    user: User, model: Path, pushed: str, plain: str
) -> None:
    code = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(model)!r})
tokenizer = AutoTokenizer.from_pretrained({str(model)!r})
inputs = tokenizer({PROMPT!r}, return_tensors="pt")
options = {{"max_new_tokens": {NEW_TOKENS}, "do_sample": False}}
assert "hf_spec" not in sys.modules
found = model.generate(
    **inputs, **options, custom_generate={pushed!r}, trust_remote_code=True,
    return_dict_in_generate=True,
)
assert found.spec_stats.drafted_tokens > 0
assert sys.modules["hf_spec"].__file__.startswith(sys.prefix)
print(tokenizer.decode(found.sequences[0, inputs["input_ids"].shape[1] :]), end="")
"""
    assert user.python(code) == plain


def test_what_the_readme_shows(user: User, plain: str) -> None:
    text = (ROOT / "README.md").read_text()
    [code] = (block for block in text.split("```python\n")[1:] if "spec_strategy" in block)
    assert plain[:20] in user.python(code.split("```")[0])
