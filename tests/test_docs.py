"""Documentation: links resolve, examples run, generated pages and pictures are current."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
import yaml
from transformers import PreTrainedModel

import hf_spec
from examples.studies.full_table.measure import MODELS, digests
from hf_spec.cli.app import COMMANDS, load_command
from hf_spec.methods import registry
from tests import support_matrix, tiny_models

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT)
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md")]
    if "_build" not in path.parts
)

NOT_RUN = "<!-- not run:"

# Pages with a table of all options of a strategy.
OPTIONS = {
    "lookup.md": hf_spec.LookupConfig,
    "gsd.md": hf_spec.GsdConfig,
    "disco.md": hf_spec.DiscoConfig,
}

FENCE = re.compile(
    r"^(?P<mark><!--[^\n]*-->\n)?```(?P<language>\S*).*?\n(?P<code>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def read(page: Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """Return the valid link anchors of a page: its headings in GitHub's form."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.M)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {word.strip().replace(" ", "-") for word in words}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", read(page))):
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        found = (ROOT / page).parent / name if name else ROOT / page
        if not found.exists() or (anchor and anchor not in anchors(found.read_text("utf-8"))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_relative_link_resolves(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "a.md").write_text("# A heading, `code`\n[x](b.md) [y](#a-heading-code) [z](#no)\n")
    assert broken_links(Path("a.md")) == ["b.md", "#no"]


def test_every_page_stands_in_a_toctree() -> None:
    entries = [
        (path.parent / line).relative_to(DOCS)
        for path in DOCS.rglob("*.md")
        for block in FENCE.finditer(path.read_text("utf-8"))
        if block["language"] == "{toctree}"
        for line in block["code"].splitlines()
        if line and not line.startswith(":")
    ]
    pages = [path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")]
    left_out = {Path("index")}
    assert sorted(set(pages) - left_out) == sorted(entries)


def commands_of(page: Path) -> list[list[str]]:
    """Return every `hf-spec ...` of shell blocks and code spans, as words without `hf-spec`."""
    text = read(page)
    blocks = [block["code"] for block in FENCE.finditer(text) if block["language"] == "bash"]
    spans = re.findall(r"`(hf-spec [^`]+)`", FENCE.sub("", text).replace("\n", " "))
    lines = "\n".join([*blocks, *spans]).replace("\\\n", " ").splitlines()
    found = [re.search(r"\bhf-spec +([^|&#]+)", line) for line in lines]
    return [shlex.split(match[1]) for match in found if match]


def unknown_words(words: list[str]) -> list[str]:
    """Return the sub-commands and options of a call that do not exist."""
    if words[0].startswith("-"):
        return []
    if words[0] not in COMMANDS:
        return words[:1]
    command, words = load_command(words[0]), words[1:]
    while words and hasattr(command, "commands") and words[0] != "...":
        if words[0] not in command.commands:
            return words[:1]
        command, words = command.commands[words[0]], words[1:]
    options = {"--help", *(opt for p in command.params for opt in (*p.opts, *p.secondary_opts))}
    return [word for word in words if word.startswith("--") and word not in options]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_and_options_exist(page: Path) -> None:
    unknown = [(words, wrong) for words in commands_of(page) if (wrong := unknown_words(words))]
    assert unknown == []


def test_an_unknown_command_is_seen() -> None:
    assert unknown_words(["fly"]) == ["fly"]
    assert unknown_words(["train", "swimming"]) == ["swimming"]
    assert unknown_words(["train", "falcon", "--out", "x", "--speed", "9"]) == ["--speed"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model and its tokenizer, used instead of SmolLM2."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.build("llama").save_pretrained(folder)
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def names(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a namespace for the code of a page, with a tiny model instead of SmolLM2."""
    monkeypatch.setattr("hf_spec.common.small_models.smollm2_135m_instruct", lambda: tiny_folder)
    monkeypatch.setattr(registry, "_STRATEGIES", dict(registry._STRATEGIES))
    return {"__name__": "documentation"}


def python_blocks(page: Path | str) -> list[re.Match[str]]:
    """Return the Python blocks of a page that are not marked as not run."""
    blocks = [block for block in FENCE.finditer(read(page)) if block["language"] == "python"]
    return [block for block in blocks if not (block["mark"] or "").startswith(NOT_RUN)]


def run_blocks(page: Path | str, names: dict[str, Any]) -> None:
    """Execute the Python blocks of a page in one namespace."""
    for block in python_blocks(page):
        line = read(page)[: block.start("code")].count("\n")
        exec(
            compile("\n" * line + block["code"], str(ROOT / page), "exec", dont_inherit=True), names
        )


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_examples_parse_and_name_what_exists(page: Path) -> None:
    """This includes examples that need a real model or an adapter."""
    for block in FENCE.finditer(read(page)):
        if block["language"] == "python":
            ast.parse(block["code"])
            for name in re.findall(r"\bhf_spec\.([A-Z]\w+|[a-z_]+\()", block["code"]):
                assert hasattr(hf_spec, name.rstrip("(")), f"hf_spec.{name}"


USER_PAGES = [page for page in PAGES if page.parts[0] in {"README.md", "docs"}]


@pytest.mark.by_default(page=lambda page: page.name == "README.md")
@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in USER_PAGES if python_blocks(page)], ids=str)
def test_examples_run_as_pasted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, on the real model, with nothing defined before."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(registry, "_STRATEGIES", dict(registry._STRATEGIES))
    run_blocks(page, {"__name__": "documentation"})


class TestYourOwnDrafter:
    """Code of the page, run through `generate()`."""

    PAGE = "docs/your-own-drafter.md"

    def test_it_needs_no_more_than_the_package_exports(self) -> None:
        blocks = [b["code"] for b in FENCE.finditer(read(self.PAGE)) if b["language"] == "python"]
        nodes = [node for code in blocks for node in ast.walk(ast.parse(code))]
        modules = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
        modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        own = {name for name in modules if name.startswith("hf_spec")}
        assert own == {"hf_spec", "hf_spec.common.small_models"}
        names = [
            alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "hf_spec"
            for alias in node.names
        ]
        assert {"Drafter", "DraftTree", "StrategyConfig", "register"} <= set(names)
        assert set(names) <= set(hf_spec.__all__)

    def test_it_is_lossless_and_is_accepted(self, names: dict[str, Any]) -> None:
        run_blocks(self.PAGE, names)
        model: PreTrainedModel = names["model"]
        batch = tiny_models.prompts("llama", "ragged")
        plain = model.generate(**batch, max_new_tokens=16, do_sample=False)
        output = model.generate(
            **batch,
            max_new_tokens=16,
            do_sample=False,
            spec_strategy="corpus",
            assistant=plain.tolist(),
            return_dict_in_generate=True,
        )
        assert output.sequences.tolist() == plain.tolist()
        assert output.spec_stats.tau > 1
        with pytest.raises(hf_spec.AssistantError, match="needs assistant="):
            model.generate(**batch, spec_strategy="corpus", assistant="a folder")

    @pytest.mark.parametrize("seed", range(3))
    def test_sampled_tokens_are_those_that_come_without_drafts(
        self, seed: int, names: dict[str, Any]
    ) -> None:
        """`NodeDraw` draws once per token for any tree, and one row has no other draws."""
        run_blocks(self.PAGE, names)
        model: PreTrainedModel = names["model"]

        def sample(**strategy: Any) -> Any:
            torch.manual_seed(seed)
            return model.generate(
                **tiny_models.prompts("llama", "one"),
                max_new_tokens=24,
                do_sample=True,
                temperature=0.7,
                return_dict_in_generate=True,
                **strategy,
            )

        undrafted = sample(spec_strategy="none").sequences
        output = sample(spec_strategy="corpus", assistant=undrafted.tolist())
        assert output.sequences.tolist() == undrafted.tolist()
        assert output.spec_stats.tau > 1


@pytest.mark.parametrize("page", OPTIONS)
def test_tables_of_options_are_complete(page: str) -> None:
    options = read(f"docs/{page}").partition("| option | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", options, re.M)
    said = {
        name: default.strip("` ") for cell, default in rows for name in re.findall(r"\w+", cell)
    }
    fields = dataclasses.fields(OPTIONS[page])
    assert said == {field.name: json_like(field.default) for field in fields}


def json_like(default: Any) -> str:
    """Return a default in the format of the tables."""
    return f'"{default}"' if isinstance(default, str) else str(default)


def test_the_support_matrix_is_current() -> None:
    tested_with = re.search(r"^transformers==([\d.]+)", read("constraints.txt"), re.M)
    assert tested_with is not None
    if transformers.__version__ != tested_with[1]:
        pytest.skip(f"the page is made with transformers {tested_with[1]}")
    assert support_matrix.PAGE.read_text("utf-8") == support_matrix.page(), (
        "run: python -m tests.support_matrix"
    )


class TestPagesOfPapers:
    MADE = runpy.run_path(str(DOCS / "paper_tables.py"))
    PAGES: ClassVar = sorted(MADE["FOLDER"].glob("*.md"))

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
    def test_tables_are_current(self, page: Path) -> None:
        text = page.read_text("utf-8")
        assert text == self.MADE["written"](text), "run: python -m docs.paper_tables"
        assert len(text.split()) <= 600

    def test_every_table_is_on_a_page(self) -> None:
        marks = [m[2] for page in self.PAGES for m in self.MADE["MARK"].finditer(page.read_text())]
        assert sorted(marks) == sorted(self.MADE["TABLES"])


def test_the_command_line_page_is_current() -> None:
    made = runpy.run_path(str(DOCS / "command_line.py"))
    page = made["PAGE"].read_text("utf-8")
    assert page == made["written"](page), "run: python docs/command_line.py"
    assert "<!-- commands: table -->" in page
    for name in made["commands"]():
        assert f"\nUsage: hf-spec {name} [OPTIONS]" in page


def test_the_drawings_are_current() -> None:
    made = runpy.run_path(str(DOCS / "drawings.py"))
    for name, draw in made["DRAWINGS"].items():
        assert (DOCS / "images" / name).read_text("utf-8") == draw(), "run: python docs/drawings.py"


def css_rules(path: Path) -> dict[str, str]:
    """Return the selectors of a style sheet outside of media queries, with their declarations."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.S)
    text = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", text)
    rules: dict[str, str] = {}
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", text):
        for selector in selectors.split(","):
            rules[selector.strip()] = rules.get(selector.strip(), "") + " ".join(body.split())
    return rules


class TestStyle:
    SHEET = DOCS / "_static/hf_spec.css"

    def test_it_is_used(self) -> None:
        config = runpy.run_path(str(DOCS / "conf.py"))
        assert config["html_css_files"] == [self.SHEET.name]
        assert [path.name for path in self.SHEET.parent.iterdir()] == [self.SHEET.name]

    def test_wide_tables_code_and_plots_scroll_in_their_own_boxes(self) -> None:
        """The theme makes tables and code scroll; our rules only must let columns shrink."""
        furo = pytest.importorskip("furo", reason="the extra docs is not installed")
        theme = css_rules(Path(furo.__file__).parent / "theme/furo/static/styles/furo.css")
        assert "overflow-x:auto" in theme["[role=main] .table-wrapper.container"]
        assert "overflow:auto" in theme["pre"]
        ours = css_rules(self.SHEET)
        for column in (".main", ".content"):
            assert "min-width: 0" in ours[column]
        assert "overflow-x: auto" in ours["article p:has(> img)"]

    def test_pages_leave_tables_and_pictures_to_the_theme(self) -> None:
        """Tables and pictures written in HTML would not scroll and would have no style."""
        found = [
            page for page in PAGES if re.search(r"<(table|img|pre)\b", FENCE.sub("", read(page)))
        ]
        assert found == []


def test_the_front_page_shows_a_result_before_it_links() -> None:
    text = read("docs/index.md")
    first_link = next(match.start() for match in re.finditer(r"(?<!!)\[[^\]]*\]\([^)]*\)", text))
    assert text.index("](images/ui.png)") < first_link


class TestSpeeds:
    """Every speed in README and docs is generated from one record of the shipped adapters."""

    MADE = runpy.run_path(str(DOCS / "speeds.py"))

    @pytest.mark.parametrize("page", MADE["PAGES"])
    def test_the_pages_have_the_figures_of_the_record(self, page: str) -> None:
        assert "<!-- speeds: " in read(page)
        assert read(page) == self.MADE["written"](read(page)), "run: python -m docs.speeds"

    def test_the_picture_has_them_too(self) -> None:
        assert self.MADE["PICTURE"].read_text("utf-8") == self.MADE["picture"]()

    def test_the_record_is_of_the_adapters_that_are_shipped(self) -> None:
        for model, path in self.MADE["RECORDS"].items():
            record = json.loads(path.read_text("utf-8"))
            assert record["adapters"] == digests(MODELS[model], ROOT / "examples" / "adapters")

    def test_its_outputs_are_those_of_plain_generate(self) -> None:
        for path in self.MADE["RECORDS"].values():
            rows = self.MADE["rows_of"](json.loads(path.read_text("utf-8")))
            assert {"plain", "none", "lookup", "falcon", "auto"} <= {row["name"] for row in rows}
            assert all(row["identical"] == row["outputs"] for row in rows)

    def test_answers_to_human_eval_are_those_of_none_and_differ_from_plain_by_ties(self) -> None:
        for record in json.loads(self.MADE["HUMAN_EVAL"].read_text("utf-8"))["records"]:
            for name, result in record["results"].items():
                assert name == "plain" or result["equals_none"], record["problem"]
                assert {one["kind"] for one in result["differences"]} <= {"tie"}, record["problem"]

    @pytest.mark.parametrize("page", USER_PAGES, ids=str)
    def test_no_other_page_quotes_a_speed(self, page: Path) -> None:
        """Only generated pages have speedups."""
        if page.name in {"README.md", "benchmarks.md", "papers.md"}:
            return
        assert re.findall(r"\b\d+\.\d+x\b", FENCE.sub("", read(page))) == []


def test_the_citation_names_this_version_and_every_method() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == hf_spec.__version__
    cited = {entry["identifiers"][0]["value"] for entry in citation["references"]}
    assert cited == set(re.findall(r"arXiv:\d{4}\.\d{5}", read("README.md")))
