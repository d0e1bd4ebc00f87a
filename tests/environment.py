"""Environment variables of the tests and of the programs that they start.

Results do not depend on the user's variables. These settings are kept: the GPUs
(`CUDA_VISIBLE_DEVICES`), the device of the tiny models (`HF_SPEC_TEST_DEVICE`), fewer threads, the
cache of the converted models (`HF_SPEC_CACHE`), and proxies, which pip may need to download them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping

# Variables of these libraries and of hf_spec: servers, tokens, caches, offline modes, logging.
PREFIXES = (
    "ACCELERATE_",
    "GRADIO_",
    "HF_",
    "HUGGINGFACE_",
    "HUGGING_FACE_",
    "OPENAI_",
    "TRANSFORMERS_",
)
REMOVED = (
    # Colors and widths of help pages and tables.
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "FORCE_COLOR",
    "GITHUB_ACTIONS",
    "NO_COLOR",
    "PY_COLORS",
    "TERMINAL_WIDTH",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    # With it, every program that tests start would compile the package again.
    "PYTHONDONTWRITEBYTECODE",
    # Extra output of programs.
    "PYTHONWARNINGS",
    "TORCH_LOGS",
    # Languages and encodings of messages.
    "LANGUAGE",
    "LC_ALL",
    # Overrides `OMP_NUM_THREADS` in MKL.
    "MKL_NUM_THREADS",
)
KEPT = ("HF_SPEC_CACHE", "HF_SPEC_TEST_DEVICE")
# A terminal of standard size, even if pytest runs in another one without capturing.
SET = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "LANG": "C.UTF-8"}
# Hosts of servers that tests start, which must bypass proxies.
LOCAL = ("127.0.0.1", "localhost")


def neutralize(variables: MutableMapping[str, str]) -> None:
    """Remove or set all variables on which tests depend.

    Call this before the import of torch, transformers and huggingface_hub, which read them once.
    """
    for name in list(variables):
        removed = name in REMOVED or (name.startswith(PREFIXES) and name not in KEPT)
        # httpx opens all proxies at once, and SOCKS needs a package that the tests do not install.
        socks = name.lower().endswith("_proxy") and variables[name].startswith("socks")
        if removed or socks:
            del variables[name]
    variables.update(SET)
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in variables.get(name, "").split(",") if host]
        variables[name] = ",".join(dict.fromkeys([*hosts, *LOCAL]))
    _limit_threads(variables)
    # A new home has none of the user's models, tokens and downloaded code.
    variables["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home-")
    atexit.register(shutil.rmtree, variables["HF_HOME"], ignore_errors=True)


def _limit_threads(variables: MutableMapping[str, str]) -> None:
    """Divide the cores among the processes of `pytest -n`, so that their threads do not wait."""
    processes = variables.get("PYTEST_XDIST_WORKER_COUNT")
    limit = max(1, (os.cpu_count() or 1) // int(processes or 1))
    chosen = variables.pop("OMP_NUM_THREADS", "")
    if chosen.isdecimal() and 0 < int(chosen) <= limit:
        variables["OMP_NUM_THREADS"] = chosen
    elif processes:
        variables["OMP_NUM_THREADS"] = str(limit)
