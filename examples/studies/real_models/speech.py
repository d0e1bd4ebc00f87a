"""Compare strategies with plain `generate()` for Whisper on synthesized speech: output and speed.

    python -m examples.studies.real_models.speech --model FOLDER --out speech.json

Needs the program espeak-ng. Recordings differ in voice, speed, and noise. Strategies alternate on
every recording, so changes in the machine's speed affect all of them. The encoder is timed
separately, because drafting cannot speed it up.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import subprocess
import time
import wave
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import hf_spec
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.prompts import load_prompts

RATE = 16_000
# Length of Whisper's input window.
WINDOW_SECONDS = 30
VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-us+f3", "en-gb+m4", "en-us+m7")
# Words per minute, and signal-to-noise ratios in decibels.
SPEEDS = (130, 160, 190)
NOISES = (None, 30, 20, 12)
WORDS = (10, 14, 20, 25, 30, 40, 45, 55, 60, 70, 130, 160)
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "none": {"spec_strategy": "none"},
    "lookup": {"spec_strategy": "lookup"},
    "draft": {"spec_strategy": "draft", "assistant": "truncated:3"},
    "auto": {"spec_strategy": "auto"},
    "auto, draft": {"spec_strategy": "auto", "assistant": "truncated:3"},
}
Audio = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Recording:
    """Samples at 16 kHz between -1 and 1, and how they were made."""

    audio: Audio
    voice: str
    words_per_minute: int
    noise: int | None

    @property
    def seconds(self) -> float:
        """Duration."""
        return len(self.audio) / RATE

    @property
    def is_long(self) -> bool:
        """True if the recording needs several windows."""
        return self.seconds > WINDOW_SECONDS


def texts() -> Iterator[str]:
    """Yield the news articles of the evaluation prompts."""
    for prompt in load_prompts(tasks=["summarization"]):
        yield " ".join(re.findall(r"[\w',.-]+", prompt.turns[0].partition("\n")[2]))


def synthesize(text: str, voice: str, words_per_minute: int) -> Audio:
    """Return the text as spoken by espeak-ng."""
    command = ["espeak-ng", "-v", voice, "-s", str(words_per_minute), "--stdout", text]
    output = subprocess.run(command, check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(output)) as file:
        rate = file.getframerate()
        # The header of a stream has no valid length.
        samples = np.frombuffer(file.readframes(2**30), np.int16)
    audio = samples.astype(np.float32) / 2**15
    instants = np.arange(0, len(audio), rate / RATE)
    return np.interp(instants, np.arange(len(audio)), audio).astype(np.float32)


def with_noise(audio: Audio, decibels: int | None, seed: int) -> Audio:
    """Add white noise at a signal-to-noise ratio; None adds nothing."""
    if decibels is None:
        return audio
    power = float(np.mean(audio**2)) / 10 ** (decibels / 10)
    noise = np.random.default_rng(seed).normal(0, power**0.5, len(audio))
    return (audio + noise).astype(np.float32)


def record(count: int) -> list[Recording]:
    """Return recordings of different lengths, voices, speeds, and noise."""
    articles = list(texts())
    recordings = []
    for index in range(count):
        words = articles[index % len(articles)].split()
        start = 30 * (index // len(articles))
        text = " ".join(words[start : start + WORDS[index % len(WORDS)]])
        # The numbers of choices share factors, so shift the noise after every cycle of voices.
        voice, speed = VOICES[index % len(VOICES)], SPEEDS[index % len(SPEEDS)]
        noise = NOISES[(index + index // len(VOICES)) % len(NOISES)]
        audio = with_noise(synthesize(text, voice, speed), noise, seed=index)
        recordings.append(Recording(audio, voice, speed, noise))
    return recordings


class Transcriber:
    """Whisper model with its processor."""

    def __init__(self, model: Any, processor: Any):
        self.model = model
        self.processor = processor

    def features(self, recordings: Sequence[Recording]) -> dict[str, Tensor]:
        """Return the model's inputs; a batch is padded to its longest recording."""
        is_long = any(recording.is_long for recording in recordings)
        options = {"padding": "longest", "truncation": False} if is_long else {}
        return dict(
            self.processor(
                [recording.audio for recording in recordings],
                sampling_rate=RATE,
                return_tensors="pt",
                return_attention_mask=True,
                **options,
            )
        )

    def transcribe(
        self, inputs: dict[str, Tensor], is_long: bool, **options: Any
    ) -> list[list[int]]:
        """Return the tokens of each recording."""
        tokens = self.model.generate(
            **inputs,
            language="en",
            task="transcribe",
            return_timestamps=is_long,
            num_beams=1,
            **options,
        )
        rows: list[list[int]] = tokens.tolist()
        return rows

    def encode(self, inputs: dict[str, Tensor]) -> None:
        """Run the encoder alone over every window."""
        with torch.no_grad():
            for window in inputs["input_features"].split(WINDOW_SECONDS * 100, dim=-1):
                padding = WINDOW_SECONDS * 100 - window.shape[-1]
                self.model.get_encoder()(torch.nn.functional.pad(window, (0, padding)))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call and its seconds."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def measure(
    transcriber: Transcriber, group: Sequence[Recording], repeats: int, first: int
) -> dict[str, Any]:
    """Time all strategies on one batch; `first` is the index of the strategy that runs first."""
    inputs = transcriber.features(group)
    is_long = any(recording.is_long for recording in group)
    seconds: dict[str, list[float]] = {name: [] for name in ("encoder", *STRATEGIES)}
    tokens: dict[str, list[list[int]]] = {}
    accepted: dict[str, float] = {}
    names = [*STRATEGIES][first:] + [*STRATEGIES][:first]
    for _ in range(repeats):
        seconds["encoder"].append(timed(lambda: transcriber.encode(inputs))[1])
        for name in names:
            with hf_spec.collect_stats() as stats:
                tokens[name], spent = timed(
                    lambda options=STRATEGIES[name]: transcriber.transcribe(
                        inputs, is_long, **options
                    )
                )
            seconds[name].append(spent)
            rounds = sum(call.target_forwards for call in stats)
            accepted[name] = sum(call.accepted_tokens for call in stats) / max(rounds, 1)
    plain = tokens["plain"]
    return {
        "recordings": [
            {
                "seconds": round(recording.seconds, 1),
                "voice": recording.voice,
                "words_per_minute": recording.words_per_minute,
                "noise": recording.noise,
            }
            for recording in group
        ],
        "transcripts": transcriber.processor.batch_decode(plain, skip_special_tokens=True),
        "new_tokens": max(map(len, plain)),
        "identical": {name: rows == plain for name, rows in tokens.items() if name != "plain"},
        "accepted": accepted,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
    }


def table(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per batch size and strategy, with medians and minima over recordings."""
    rows = []
    for size in sorted({len(result["recordings"]) for result in results}):
        here = [result for result in results if len(result["recordings"]) == size]
        for name in STRATEGIES:
            if name == "plain":
                continue
            whole, decoding = [], []
            for result in here:
                seconds, encoder = result["seconds"], result["seconds"]["encoder"]
                whole.append(seconds["plain"] / seconds[name])
                decoding.append((seconds["plain"] - encoder) / (seconds[name] - encoder))
            rows.append(
                {
                    "batch": size,
                    "strategy": name,
                    "identical": sum(result["identical"][name] for result in here),
                    "of": len(here),
                    "accepted": statistics.mean(result["accepted"][name] for result in here),
                    "speedup": statistics.median(whole),
                    "least": min(whole),
                    "decoding": statistics.median(decoding),
                }
            )
    return rows


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder or Hub id of a Whisper model")
    parser.add_argument("--recordings", type=int, default=24)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    transcriber = Transcriber(model.eval(), AutoProcessor.from_pretrained(options.model))
    recordings = record(options.recordings)
    # Warm-up: weight packing, layer compilation, and first cost measurements.
    measure(transcriber, recordings[:1], 1, 0)
    results = []
    for size in options.batch_sizes:
        ordered = sorted(recordings, key=lambda recording: recording.is_long)
        groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        for index, group in enumerate(groups):
            result = measure(transcriber, group, options.repeats, index % len(STRATEGIES))
            results.append(result)
            print(size, result["seconds"], all(result["identical"].values()), flush=True)
    rows = table(results)
    for row in rows:
        print(row)
    if options.out:
        content = {"environment": environment(), "table": rows, "results": results}
        write_json(options.out, content)


if __name__ == "__main__":
    main()
