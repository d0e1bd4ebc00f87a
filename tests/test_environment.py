"""Environment variables of users do not affect the tests; see `environment`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import neutralize
from tests.installed import ROOT

HOSTILE = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ALL_PROXY": "http://127.0.0.1:9",
    "COLUMNS": "40",
    "FORCE_COLOR": "1",
    "GITHUB_ACTIONS": "true",
    "HF_DATASETS_OFFLINE": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_HOME": "/dev/null/hf",
    "HF_HUB_CACHE": "/dev/null/hub",
    "HF_HUB_OFFLINE": "1",
    "HF_SPEC_API_KEY": "secret",
    "HF_SPEC_DEBUG": "1",
    "HF_TOKEN": "hf_wrong",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "LANG": "C",
    "LC_ALL": "C",
    "LINES": "5",
    "MKL_NUM_THREADS": "3",
    "OMP_NUM_THREADS": "3",
    "PYTHONWARNINGS": "always",
    "TERM": "dumb",
    "TERMINAL_WIDTH": "40",
    "TORCH_LOGS": "+dynamo",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "debug",
    "TRITON_INTERPRET": "0",
}
# Tests that some of these variables would affect if they were kept; they take a second.
SENSITIVE = (
    "tests/cli/test_app.py::test_a_wrong_name_is_answered_with_the_near_one",
    "tests/cli/test_failures.py::TestCommandLine::test_the_root_catches",
    "tests/cli/test_options.py::TestOptionsFromSettings::test_the_help_is_what_the_settings_say",
    "tests/common/test_hub.py::test_a_hub_that_answers",
    "tests/common/test_hub.py::test_the_cache_serves_without_a_hub",
    "tests/kernels/test_dispatch.py::test_an_interpreted_kernel_has_to_be_asked_for",
)


@pytest.mark.full
def test_sensitive_tests_in_a_hostile_environment(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*command, "--color=no", "--basetemp", tmp_path / "inner", *SENSITIVE],
        cwd=ROOT,
        env={**os.environ, **HOSTILE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # No test is skipped.
    assert re.search(rf"^{len(SENSITIVE)} passed", done.stdout, re.M), done.stdout


def test_what_is_left_of_a_hostile_environment() -> None:
    kept = {
        "CUDA_VISIBLE_DEVICES": "1",
        "HF_SPEC_CACHE": "/models",
        "HTTPS_PROXY": "http://proxy.example",
        "NO_PROXY": "index.example",
        "PATH": "/bin",
    }
    removed = {"OPENAI_BASE_URL": "http://127.0.0.1:9", "all_proxy": "socks5h://127.0.0.1:9"}
    variables = {**HOSTILE, **removed, **kept}
    neutralize(variables)
    proxies = {name for name in HOSTILE if name.endswith("_PROXY")}
    assert variables.keys() - kept.keys() - proxies == {
        "COLUMNS",
        "HF_HOME",
        "LANG",
        "LINES",
        "TERM",
        "TRITON_INTERPRET",
        "no_proxy",
    }
    assert variables["COLUMNS"] == "80"
    assert variables["LANG"] == "C.UTF-8"
    assert not list(Path(variables["HF_HOME"]).iterdir())
    assert variables["NO_PROXY"] == "index.example,127.0.0.1,localhost"
    assert variables["no_proxy"] == "127.0.0.1,localhost"
    for name in kept.keys() - {"NO_PROXY"}:
        assert variables[name] == kept[name]


@pytest.mark.parametrize(
    ("chosen", "processes", "expected"),
    [
        (None, None, None),
        (None, "2", "4"),
        ("1", None, "1"),
        ("1", "2", "1"),
        ("64", None, None),
        ("64", "2", "4"),
        ("4,2", "4", "2"),
        (None, "64", "1"),
    ],
)
def test_more_threads_than_cores_are_refused(
    chosen: str | None, processes: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    given = {"OMP_NUM_THREADS": chosen, "PYTEST_XDIST_WORKER_COUNT": processes}
    variables = {name: value for name, value in given.items() if value is not None}
    neutralize(variables)
    assert variables.get("OMP_NUM_THREADS") == expected


def test_the_tests_themselves_run_so() -> None:
    import huggingface_hub.constants

    assert os.environ["HF_HOME"] == huggingface_hub.constants.HF_HOME
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
