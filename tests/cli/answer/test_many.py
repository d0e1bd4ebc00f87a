"""`hf-spec generate --prompts`: one answer per prompt, even after a process was killed."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from hf_spec.cli.answer import many
from hf_spec.cli.app import build_app
from tests.cli.answer.conftest import PROMPT, make_tokenizer
from tests.installed import ROOT
from tests.tiny_models import build

NEW_TOKENS = 24
TORCHRUN = ["torch.distributed.run", "--nproc-per-node=2", "--master-port=29641"]
# On a CPU accelerate starts one process by default; --multi_gpu makes it act like torchrun.
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
ACCELERATE += ["--main_process_port=29643"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(build_app(), ["generate", *map(str, arguments)])


def said(result: Any) -> str:
    """Return the output of a command, without frames and line breaks."""
    return re.sub(r"[│\s]+", " ", result.output)


def options(source: Path, out: Path) -> list[Any]:
    length = ("--raw", "--max-new-tokens", NEW_TOKENS, "--strategy", "lookup", "--batch-size", 3)
    return ["--prompts", source, "--out", out, *length]


def texts(count: int) -> list[str]:
    words = PROMPT.split()
    return [" ".join(words[n % len(words) :] + words[: n % 5 + 1]) for n in range(count)]


def write(source: Path, prompts: list[str]) -> Path:
    lines = (json.dumps({"id": f"p{n}", "turns": [text]}) for n, text in enumerate(prompts))
    source.write_text("\n".join(lines))
    return source


def answers(out: Path) -> list[tuple[str, list[int]]]:
    lines = map(json.loads, out.read_text().splitlines())
    return [(line["id"], line["token_ids"]) for line in lines]


def expected(prompts: list[str]) -> list[tuple[str, list[int]]]:
    found = []
    for number, text in enumerate(prompts):
        ids = make_tokenizer()(text, return_tensors="pt")["input_ids"]
        said = build("llama").generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append((f"p{number}", said[0, ids.shape[1] :].tolist()))
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", texts(7))


def test_answers_come_in_the_order_of_the_prompts(
    folder: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    result = run(folder, *options(source, out))
    assert result.exit_code == 0, result.output
    assert answers(out) == expected(texts(7))
    [line, *_] = map(json.loads, out.read_text().splitlines())
    assert line["text"] == make_tokenizer().decode(line["token_ids"], skip_special_tokens=True)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]
    again = run(folder, *options(source, out))
    assert (again.exit_code, "has all answers already" in again.stderr) == (0, True)


def test_a_run_resumes_from_complete_lines(
    folder: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, works = tmp_path / "out.jsonl", many.Responder.generate_each

    def killed(*given: Any) -> Iterator[Any]:
        yield from islice(works(*given), 3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(many.Responder, "generate_each", killed)
        assert run(folder, *options(source, out)).exit_code != 0
    [part] = tmp_path.glob("*.part")
    # Simulate another process of an earlier run that was killed while writing a line.
    part = part.rename(tmp_path / "out.jsonl.3.part")
    part.write_bytes(part.read_bytes()[:-9])
    result = run(folder, *options(source, out))
    assert "process 0: 5 of 7" in result.stderr
    assert answers(out) == expected(texts(7))


def test_files_that_are_something_else_are_refused(
    folder: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    for content in ("not JSON", '{"id": "other"}', "[1]", "[" * 100_000):
        out.write_text(content)
        result = run(folder, *options(source, out))
        assert (result.exit_code, "not a file of answers" in said(result)) == (2, True)
        assert out.read_text() == content
    out.unlink()
    out.with_name("out.jsonl.0.part").write_text('{"format": "hf_spec.answers", "model": "x"}\n')
    assert "was made with" in said(run(folder, *options(source, out)))
    for wrong in (["--prompts", source], ["--out", out], [PROMPT, "--prompts", source]):
        result = run(folder, *wrong)
        assert result.exit_code == 2
        assert "--prompts needs --out" in said(result)
    for useless in ("--json", "--stats"):
        result = run(folder, *options(source, out), useless)
        assert (result.exit_code, "support only a single prompt" in said(result)) == (2, True)
    source.write_text(json.dumps({"id": "chat", "turns": ["a", "b"]}))
    assert "'chat' has several turns" in said(run(folder, *options(source, tmp_path / "o")))


class TestAnotherRun:
    """An output file of another run raises an error with its name and is not changed."""

    @pytest.fixture
    def out(self, folder: Path, source: Path, tmp_path: Path) -> Path:
        out = tmp_path / "out.jsonl"
        assert run(folder, *options(source, out)).exit_code == 0
        return out

    def refused(self, out: Path, *arguments: Any) -> str:
        before = out.read_bytes()
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert out.read_bytes() == before
        assert [path.name for path in out.parent.glob("out*")] == ["out.jsonl"]
        return said(result)

    def test_other_prompts_under_the_same_ids(self, folder: Path, source: Path, out: Path) -> None:
        write(source, [*texts(6), "w40 w41"])
        reason = self.refused(out, folder, *options(source, out))
        assert "out.jsonl holds answers to 1 prompts that are not among the prompts" in reason
        assert "choose another file" in reason

    def test_other_settings(self, folder: Path, source: Path, out: Path) -> None:
        longer = [*options(source, out), "--max-new-tokens", NEW_TOKENS + 1]
        assert "max_new_tokens=24 (now 25)" in self.refused(out, folder, *longer)
        sampled = [*options(source, out), "--do-sample"]
        assert "sample=False (now True)" in self.refused(out, folder, *sampled)

    @pytest.mark.parametrize("name", ["model", "other"])
    def test_other_weights(
        self, folder: Path, source: Path, out: Path, tmp_path: Path, name: str
    ) -> None:
        """The other model's folder has the same name elsewhere, or another name."""
        other = tmp_path / "elsewhere" / name
        model = copy.deepcopy(build("llama"))
        with torch.no_grad():
            # The embeddings, which identify the base model of an adapter, are unchanged.
            model.model.layers[0].mlp.up_proj.weight[3, 5] += 1e-3
        model.save_pretrained(other)
        make_tokenizer().save_pretrained(other)
        reason = self.refused(out, other, *options(source, out))
        assert f"elsewhere/{name}" in reason
        assert "weights=" in reason

    def test_another_tokenizer(self, source: Path, out: Path, tmp_path: Path) -> None:
        """The model folder is the same, but its chat template was edited."""
        model = tmp_path / "model"
        build("llama").save_pretrained(model)
        make_tokenizer().save_pretrained(model)
        given = [option for option in options(source, tmp_path / "chat") if option != "--raw"]
        assert run(model, *given).exit_code == 0
        make_tokenizer("{{ messages[0]['content'] }} w50").save_pretrained(model)
        result = run(model, *given)
        assert (result.exit_code, "holds answers to 7 prompts" in said(result)) == (2, True)

    def test_a_strategy_that_changes_the_output(self, folder: Path, source: Path) -> None:
        out = source.with_name("lossy.jsonl")
        sampled = [*options(source, out), "--do-sample", "--assistant", "truncated:1", "--strategy"]
        assert run(folder, *sampled, "gsd:compile=false").exit_code == 0
        assert "has all answers" in run(folder, *sampled, "tree:compile=false").stderr
        lossy = "gsd:compile=false,lossy=true"
        assert f"strategy=None (now '{lossy}')" in said(run(folder, *sampled, lossy))


class TestChangedPrompts:
    """Existing answers are matched to prompts by content."""

    def test_they_are_reordered_and_extended(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Prompt ids of a text file are line numbers, so every prompt gets a new id."""
        source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
        first, then = texts(4), ["w50 w51", *reversed(texts(4)), "w60"]
        source.write_text("\n".join(first))
        assert run(folder, *options(source, out)).exit_code == 0
        source.write_text("\n".join(then))
        result = run(folder, *options(source, out))
        assert "process 0: 2 of 6 answers" in result.stderr
        assert [tokens for _, tokens in answers(out)] == [tokens for _, tokens in expected(then)]
        assert [name for name, _ in answers(out)] == [str(n) for n in range(6)]
        assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]

    def test_only_the_order_changes(self, folder: Path, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        run(folder, *options(source, out))
        before = answers(out)
        source.write_text("\n".join(reversed(source.read_text().splitlines())))
        assert "has all answers already" in run(folder, *options(source, out)).stderr
        assert answers(out) == before[::-1]

    def test_equal_prompts_have_an_answer_each(self, folder: Path, tmp_path: Path) -> None:
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        write(source, [PROMPT, "w9", PROMPT])
        assert run(folder, *options(source, out), "--do-sample", "--seed", 1).exit_code == 0
        (_, first), _, (_, third) = answers(out)
        assert first != third

    def test_a_prompt_of_an_interrupted_run_is_gone(
        self, folder: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, works = tmp_path / "out.jsonl", many.Responder.generate_each

        def killed(*given: Any) -> Iterator[Any]:
            yield from islice(works(*given), 3)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(many.Responder, "generate_each", killed)
            run(folder, *options(source, out))
        write(source, ["w40 w41"] * 7)
        reason = said(run(folder, *options(source, out)))
        assert "out.jsonl.0.part holds answers to 3 prompts" in reason


def test_special_files_are_refused(folder: Path, source: Path, tmp_path: Path) -> None:
    result = run(folder, *options(source, Path("/dev/full")))
    assert (result.exit_code, "/dev/full is a device" in said(result)) == (2, True)
    os.mkfifo(tmp_path / "pipe")
    for given in (options(tmp_path / "pipe", tmp_path / "out"), ["--prompt-file", "/dev/zero"]):
        result = run(folder, *given)
        assert result.exit_code == 2
        assert re.search("is a (pipe|device); use a regular file", said(result))


class TestTwoProcesses:
    PROMPTS = 60

    def start(self, launch: list[str], folder: Path, source: Path, out: Path) -> Any:
        given = [str(option) for option in options(source, out)]
        return subprocess.Popen(
            [sys.executable, "-m", *launch, "-m", "hf_spec", "generate", str(folder), *given],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def parts(self, out: Path) -> list[str]:
        """Return the keys of all answers in the .part files."""
        lines = [line for path in out.parent.glob("*.part") for line in complete_lines(path)]
        return [line["key"] for line in lines if "key" in line]

    @pytest.mark.full
    def test_one_of_them_is_killed(self, folder: Path, tmp_path: Path) -> None:
        source, out = write(tmp_path / "in.jsonl", texts(self.PROMPTS)), tmp_path / "out.jsonl"
        running = self.start(TORCHRUN, folder, source, out)
        while len(self.parts(out)) < 6:
            assert running.poll() is None, running.communicate()
            time.sleep(0.005)
        workers = [
            process
            for process in psutil.Process(running.pid).children(recursive=True)
            if "--prompts" in process.cmdline()
        ]
        workers[-1].kill()
        running.communicate()
        assert running.returncode != 0
        known = self.parts(out)
        assert 6 <= len(known) < self.PROMPTS
        assert not out.exists()

        running = self.start(ACCELERATE, folder, source, out)
        _, said = running.communicate()
        assert running.returncode == 0, said
        assert answers(out) == expected(texts(self.PROMPTS))
        counts = [int(line.split()[2]) for line in said.splitlines() if line.startswith("process ")]
        assert len(counts) == 2
        assert sum(counts) == self.PROMPTS - len(known), "known answers are not made again"
        assert not list(tmp_path.glob("*.part"))


def complete_lines(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def test_a_seed_draws_the_same_again(folder: Path, source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        sampled = [*options(source, tmp_path / name), "--do-sample", "--seed", 1]
        assert run(folder, *sampled).exit_code == 0
    assert answers(tmp_path / "a") == answers(tmp_path / "b") != expected(texts(7))
