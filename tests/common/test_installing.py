"""The install command, which never uses the package name; detection of the `hf-spec` command."""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path

import pytest

from hf_spec.common.installing import WHERE, how_to_install, install_command, started_as_command

ROOT = Path(__file__).parents[2]
# Files that users read. The CHANGELOG may also cite earlier commands.
TEXTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*", "hf_spec/**/*.py", "kernels/**/*.py")
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in {".md", ".py", ".txt", ".ipynb"} and path.name != "CHANGELOG.md"
]
# Other packages, options and folders, such as ".[demo]", are allowed.
BY_NAME = re.compile(r"pip3? install [^`\n&;|#]*?(?<![\w/.])hf[-_]spec(?![\w/])")


def test_the_command_names_the_folder() -> None:
    assert install_command() == "pip install ."
    assert install_command("demo") == 'pip install ".[demo]"'
    assert how_to_install("cli") == f'run pip install ".[cli]" {WHERE}'


@pytest.mark.parametrize("text", ["pip install hf-spec", 'pip install -U "hf_spec[demo]"'])
def test_a_name_is_seen(text: str) -> None:
    assert BY_NAME.search(text)


@pytest.mark.parametrize("text", ["pip install .", 'pip install -e ".[demo]" && hf-spec demo'])
def test_a_folder_is_no_name(text: str) -> None:
    assert not BY_NAME.search(text)


def test_no_text_asks_pip_for_the_name() -> None:
    assert Path("hf_spec/common/small_models.py") in [path.relative_to(ROOT) for path in TEXTS]
    found = {
        path.relative_to(ROOT).as_posix(): match[0]
        for path in TEXTS
        for line in path.read_text("utf-8").splitlines()
        if (match := BY_NAME.search(line.partition(WHERE)[0]))
    }
    assert found == {}


def test_extras_that_are_named_exist() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = {
        extra.strip()
        for path in TEXTS
        for extras in re.findall(
            r"""pip install [^\n]*?\.\[([\w,]+)\]|how_to_install\(['"](\w+)['"]\)""",
            path.read_text("utf-8"),
        )
        for extra in ",".join(filter(None, extras)).split(",")
    }
    assert {"cli", "demo", "bench"} <= named
    assert named <= set(config["options.extras_require"])


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/usr/bin/hf-spec", True),
        ("hf-spec.exe", True),
        ("hf-spec.py", False),
        ("my-hf-spec", False),
        ("-c", False),
        ("-m", False),
        ("", False),
    ],
)
def test_started_as_command(program: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pytest", "hf_spec"])
    assert started_as_command() is expected
    monkeypatch.setattr(sys, "argv", [])
    assert not started_as_command()


def test_a_process_that_is_another_module_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-m"])
    for module, expected in (("hf_spec", True), ("hf_spec.evaluation.bench.report", False)):
        monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", module])
        assert started_as_command() is expected
