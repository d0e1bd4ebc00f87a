"""Speech study of Whisper, with synthetic sounds instead of voices."""

from __future__ import annotations

import io
import wave
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.studies.real_models import speech
from tests.targets.whisper_cases import build, sound

SECONDS = dict.fromkeys(speech.STRATEGIES, 2.0)


@pytest.fixture
def sounds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace espeak-ng: log its commands, each of which returns one second of a tone."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(22050)
            tone = 10_000 * np.sin(np.arange(22050) * 440 * 2 * np.pi / 22050)
            out.writeframes(tone.astype(np.int16).tobytes())
        return SimpleNamespace(stdout=file.getvalue())

    monkeypatch.setattr(speech.subprocess, "run", run)
    return commands


def test_recordings_differ(sounds: list[list[str]]) -> None:
    recordings = speech.record(24)
    assert {recording.seconds for recording in recordings} == {1.0}
    assert {recording.noise for recording in recordings} == set(speech.NOISES)
    assert {recording.voice for recording in recordings} == set(speech.VOICES)
    read = [command[-1] for command in sounds]
    assert len(set(read)) == 24
    assert max(len(text.split()) for text in read) > 100


def test_noise_has_the_given_power() -> None:
    audio = np.sin(np.arange(50_000) / 7).astype(np.float32)
    noise = speech.with_noise(audio, 20, seed=0) - audio
    assert np.mean(audio**2) / np.mean(noise**2) == pytest.approx(100, rel=0.05)
    assert speech.with_noise(audio, None, seed=0) is audio


class Small(speech.Transcriber):
    """Tiny transcriber that replaces the recordings by noise of one shape."""

    def __init__(self) -> None:
        tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: [str(row) for row in rows])
        super().__init__(build(), tokenizer)

    def features(self, recordings: Any) -> dict[str, Any]:
        return {"input_features": sound(len(recordings))}

    def transcribe(self, inputs: Any, is_long: bool, **options: Any) -> list[list[int]]:
        tokens = self.model.generate(**inputs, max_new_tokens=20, **options)
        rows: list[list[int]] = tokens.tolist()
        return rows

    def encode(self, inputs: Any) -> None:
        self.model.get_encoder()(inputs["input_features"])


def test_every_strategy_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {**speech.STRATEGIES, "draft": {"spec_strategy": "draft", "assistant": "truncated:1"}}
    monkeypatch.setattr(speech, "STRATEGIES", {name: few[name] for name in ("plain", "draft")})
    recording = speech.Recording(np.zeros(speech.RATE, np.float32), "en", 160, None)
    result = speech.measure(Small(), [recording, recording], repeats=1, first=1)
    assert result["identical"] == {"draft": True}
    assert len(set(result["transcripts"])) == 2
    assert min(result["seconds"].values()) > 0


def test_table() -> None:
    def result(lookup: float, identical: bool) -> dict[str, Any]:
        names = [name for name in speech.STRATEGIES if name != "plain"]
        return {
            "recordings": [{}],
            "identical": {**dict.fromkeys(names, True), "lookup": identical},
            "accepted": dict.fromkeys(names, 0.5),
            "seconds": {**SECONDS, "plain": 5.0, "encoder": 1.0, "lookup": lookup},
        }

    rows = speech.table([result(2.0, True), result(3.0, True), result(5.0, False)])
    lookup = next(row for row in rows if row["strategy"] == "lookup")
    assert (lookup["identical"], lookup["of"], lookup["batch"]) == (2, 3, 1)
    assert (lookup["speedup"], lookup["least"]) == (pytest.approx(5 / 3), 1.0)
    assert lookup["decoding"] == 2.0
