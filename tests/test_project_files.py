"""Names in files that other programs read (workflows, templates, the image) exist."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_spec.cli.app import COMMANDS
from tests.test_docs import unknown_words
from tests.test_packaging import read_setup_cfg

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
    path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"
)


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text("utf-8"))


def workflow(name: str) -> dict[Any, Any]:
    return load(GITHUB / "workflows" / name)


def steps(jobs: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in jobs.values() for step in job.get("steps", [])]


def supported_pythons() -> list[str]:
    """Return the Python versions in the classifiers of setup.cfg."""
    classifiers = read_setup_cfg()["metadata"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)", classifiers)


class TestContinuousIntegration:
    JOBS = workflow("ci.yml")["jobs"]

    def test_it_runs_the_one_command_on_every_python(self) -> None:
        [job] = self.JOBS.values()
        [run] = [step for step in job["steps"] if "run" in step]
        assert run["run"] == ".ci/run"
        assert os.access(ROOT / ".ci/run", os.X_OK)
        assert run["env"] == {"PYTHON": "python${{ matrix.python }}"}
        assert "${PYTHON:-python3}" in (ROOT / ".ci/run").read_text()
        assert job["strategy"]["matrix"] == {"python": supported_pythons()}

    def test_caches_hang_on_files_that_exist(self) -> None:
        [python] = [s["with"] for s in steps(self.JOBS) if "setup-python" in s.get("uses", "")]
        assert python["cache"] == "pip"
        named = python["cache-dependency-path"].split()
        [models] = [s["with"] for s in steps(self.JOBS) if "actions/cache" in s.get("uses", "")]
        named += re.findall(r"hashFiles\('([^']+)'\)", models["key"])
        assert len(named) == 3
        assert [name for name in named if not (ROOT / name).is_file()] == []
        # Default cache of the converted models in hf_spec.common.small_models.
        assert models["path"] == "~/.cache/hf_spec"


class TestRelease:
    JOBS = workflow("release.yml")["jobs"]

    def test_nothing_is_published_untested(self) -> None:
        called = self.JOBS["test"]["uses"]
        assert (ROOT / called).is_file()
        # YAML reads the key `on` as true.
        assert "workflow_call" in load(ROOT / called)[True]
        assert self.JOBS["build"]["needs"] == "test"
        assert self.JOBS["try"]["needs"] == "build"
        assert self.JOBS["publish"]["needs"] == "try"

    def test_it_runs_on_tags_alone_and_checks_them(self) -> None:
        assert workflow("release.yml")[True] == {"push": {"tags": ["v*"]}}
        commands = [step["run"] for step in self.JOBS["build"]["steps"] if "run" in step]
        version = read_setup_cfg()["metadata"]["version"]
        assert commands[0] == 'grep -qx "version = ${GITHUB_REF_NAME#v}" setup.cfg'
        assert f"version = {version}" in (ROOT / "setup.cfg").read_text().splitlines()
        assert commands[2] == "python -m build --no-isolation"

    def test_its_tools_are_pinned_by_version_and_hash(self) -> None:
        [install] = [
            step["run"] for step in steps(self.JOBS) if "pip install" in step.get("run", "")
        ]
        assert "--require-hashes" in install.split()
        text = (ROOT / install.split()[-1]).read_text()
        no_source, *lines = (ln for ln in text.splitlines() if not ln.startswith("#"))
        assert no_source == "--only-binary :all:"
        assert {"build", "twine", "setuptools"} <= {line.split("==")[0] for line in lines}
        assert all(re.fullmatch(r"[\w-]+==\S+ --hash=sha256:[0-9a-f]{64}", ln) for ln in lines)

    def test_the_wheel_is_tried_where_nothing_is_built(self) -> None:
        """Published files do not pass through the job that runs their dependencies."""
        [tried] = [step["run"] for step in self.JOBS["try"]["steps"] if "run" in step]
        # The wheel is installed, not the package of the checkout.
        assert "dist/*.whl" in tried
        assert 'cd "$RUNNER_TEMP" && fresh/bin/hf-spec demo' in tried
        makers = [
            name
            for name, job in self.JOBS.items()
            if any("upload-artifact" in step.get("uses", "") for step in job.get("steps", []))
        ]
        assert makers == ["build"]

    def test_publishing_needs_no_secret(self) -> None:
        job = self.JOBS["publish"]
        assert job["permissions"] == {"id-token": "write"}
        assert "pypa/gh-action-pypi-publish" in job["steps"][-1]["uses"]
        assert "secrets." not in (GITHUB / "workflows/release.yml").read_text()
        up, down = (
            next(
                s["with"]
                for s in steps(self.JOBS)
                if f"actions/{verb}-artifact" in s.get("uses", "")
            )
            for verb in ("upload", "download")
        )
        assert (up["name"], up["path"]) == (down["name"], down["path"])


def test_the_site_is_built_as_the_tests_build_it() -> None:
    jobs = workflow("docs.yml")["jobs"]
    build = next(step["run"] for step in steps(jobs) if "sphinx" in step.get("run", ""))
    tested = (ROOT / ".ci/run").read_text().split("sphinx-build")[1].split("docs ")[0]
    assert build == f"sphinx-build{tested}docs site"
    assert jobs["deploy"]["needs"] == "build"


class TestNightly:
    JOBS = workflow("nightly.yml")["jobs"]

    def test_it_takes_whatever_the_index_offers(self) -> None:
        assert "schedule" in workflow("nightly.yml")[True]
        install, _, suite = (step["run"] for step in steps(self.JOBS) if "run" in step)
        tested = re.search(r"-e (\S+)", (ROOT / ".ci/run").read_text())
        assert tested is not None
        # The installation of .ci/run, without its constraints.
        assert install == f"pip install --pre -U -e {tested[1]}"
        assert (ROOT / ".ci/run").read_text().count(f"\n{suite}\n") == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read_unless_they_say_so(path: Path) -> None:
    assert load(path)["permissions"] == {"contents": "read"}
    for job in load(path)["jobs"].values():
        for name, right in job.get("permissions", {}).items():
            assert (path.name, name, right) in {
                ("docs.yml", "pages", "write"),
                ("docs.yml", "id-token", "write"),
                ("release.yml", "id-token", "write"),
            }


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    """A tag or a branch of an action can be moved to other code; the comment names the version."""
    named = re.findall(r"^ *(?:- )?uses: (.*)$", path.read_text(), re.M)
    assert named
    for action in named:
        assert re.fullmatch(r"(\./\S+|[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+(\.\d+)+)", action)
    for step in steps(load(path)["jobs"]):
        assert ("uses" in step) != ("run" in step)
        if "actions/checkout@" in step.get("uses", ""):
            assert step["with"] == {"persist-credentials": False}


def test_an_action_has_one_version() -> None:
    uses = [s["uses"] for path in WORKFLOWS for s in steps(load(path)["jobs"]) if "uses" in s]
    assert len({use.split("@")[0] for use in uses}) == len(set(uses))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_have_what_the_site_asks_for(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] == "textarea"
        assert field["attributes"]["label"]


def test_a_bug_comes_with_verify_and_versions() -> None:
    body = load(GITHUB / "ISSUE_TEMPLATE/bug.yml")["body"]
    required = {f["id"]: f["attributes"] for f in body if f.get("validations", {}).get("required")}
    assert {"code", "verify", "versions"} <= required.keys()
    assert "hf-spec verify" in required["verify"]["description"]
    assert "transformers" in required["versions"]["description"]


@pytest.mark.parametrize("path", [*FORMS, GITHUB / "pull_request_template.md"], ids=str)
def test_commands_in_templates_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    for command in re.findall(r"`hf-spec ([^`]+)`", text):
        assert unknown_words(shlex.split(command)) == []
    for name in re.findall(r"`((?:\.ci/|[A-Z]+\.md)\w*)`", text):
        assert (ROOT / name).exists(), name


def test_pre_commit_formats_and_checks_with_the_version_that_is_tested() -> None:
    [repository] = load(ROOT / ".pre-commit-config.yaml")["repos"]
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert repository["rev"] == f"v{pinned[1]}"
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-check", "ruff-format"]


class TestImage:
    LINES = (ROOT / "Dockerfile").read_text().splitlines()

    def arguments(self, instruction: str) -> list[str]:
        return [
            line.removeprefix(f"{instruction} ")
            for line in self.LINES
            if line.startswith(f"{instruction} ")
        ]

    def test_what_is_copied_exists(self) -> None:
        copied = [name for line in self.arguments("COPY") for name in line.split()[:-1]]
        assert {"setup.cfg", "hf_spec", "kernels", "examples"} <= set(copied)
        assert [name for name in copied if not (ROOT / name).exists()] == []

    def test_it_installs_as_the_readme_does_and_runs_the_demo(self) -> None:
        assert 'pip install --no-cache-dir -c constraints.txt -e ".[demo]"' in self.arguments("RUN")
        [program], [command] = self.arguments("ENTRYPOINT"), self.arguments("CMD")
        assert (program, command) == ('["hf-spec"]', '["demo"]')
        assert "demo" in COMMANDS
        [base] = self.arguments("FROM")
        assert base.removeprefix("python:").removesuffix("-slim") in supported_pythons()

    def test_it_does_not_run_as_root(self) -> None:
        assert self.arguments("USER") == ["user"]
