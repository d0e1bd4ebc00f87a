"""Robustness of a server: malicious requests and disconnects must not affect valid requests.

By default, 32 clients send 200 requests each per turn to one `hf-spec serve`. 10% of the requests
are poisonous: unsupported settings, invalid numbers, malformed bodies, and settings that fail only
during generation. Another 10% are canceled, streaming or not. The others are valid and greedy;
half of them are streaming. Each complete answer must equal plain `generate()` in this process. The
memory of the server is measured after each turn.

For usage, run `python -m examples.studies.serving.hostile --help`; requires the extra `serve`.
Default model: a tiny random model with the tokenizer of SmolLM2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.studies.models import load_model
from examples.studies.serving.load import Server, reference, served
from hf_spec.common.machine import environment
from hf_spec.common.small_models import smollm2_135m_instruct

HUGE = 99999999
INNOCENT, POISONOUS, CANCELED = "innocent", "poisonous", "canceled"
SECONDS = 300

CONFIGS: list[dict[str, Any]] = [
    {"bad_words_ids": [[HUGE]]},
    {"forced_eos_token_id": HUGE},
    {"do_sample": True, "temperature": 1e-300},
    {"forced_bos_token_id": HUGE},
    {"begin_suppress_tokens": [HUGE]},
    {"sequence_bias": [[[5], "x"]]},
    {"do_sample": True, "eta_cutoff": float("nan")},
    {"no_repeat_ngram_size": 10**9},
    {"num_return_sequences": 10**9},
    # Passes every check but produces an infinite score, so sampling fails.
    {"do_sample": True, "eos_token_id": 2, "exponential_decay_length_penalty": [-5, 2e9]},
]
FIELDS: list[dict[str, Any]] = [
    {"logit_bias": {str(HUGE): 5}},
    {"logit_bias": [1]},
    {"stop": [5]},
    {"stop": [str(number) for number in range(1000)]},
    {"max_tokens": float("inf")},
    {"n": 1000},
    {"model": "/any/folder"},
    {"messages": [[]]},
    {"chat_template_kwargs": {"chat_template": "{% for a in range(9999999) %}{% endfor %}"}},
]
POISON = [*FIELDS, *({"generation_config": json.dumps(config)} for config in CONFIGS)]


@dataclass(frozen=True)
class Asked:
    """Request; its number determines its kind."""

    number: int
    text: str

    @property
    def kind(self) -> str:
        """Kind of the request: of every ten, one is poisonous and one is canceled."""
        return {3: POISONOUS, 7: CANCELED}.get(self.number % 10, INNOCENT)

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the request."""
        round_number = self.number // 10
        streamed = bool((self.number + round_number) % 2)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self.text}]}
        body |= {"temperature": 0, "max_tokens": 12, "stream": streamed}
        if self.kind == POISONOUS:
            poison = POISON[round_number % len(POISON)]
            if "generation_config" in poison:
                del body["temperature"]
            body |= poison
        elif self.kind == CANCELED:
            body["max_tokens"] = 400
        return body


def write_tiny_model(folder: Path) -> None:
    """Save a random Llama of two layers with the tokenizer of SmolLM2."""
    source = smollm2_135m_instruct()
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


async def ask(client: httpx2.AsyncClient, url: str, asked: Asked) -> dict[str, Any]:
    """Send one request and return a record with status and text."""
    record: dict[str, Any] = {"number": asked.number, "kind": asked.kind}
    content, headers = json.dumps(asked.body), {"Content-Type": "application/json"}
    request = client.build_request("POST", url, content=content, headers=headers, timeout=SECONDS)
    if asked.kind == CANCELED:
        return {**record, **await _leave(client, request, asked)}
    response = await client.send(request)
    record["status"] = response.status_code
    if response.status_code != 200:
        return {**record, "text": response.text}
    if not asked.body["stream"]:
        return {**record, "text": response.json()["choices"][0]["message"]["content"]}
    chunks = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data")]
    if error := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
        return {**record, "status": "error in the stream", "text": error}
    pieces = (chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return {**record, "text": "".join(pieces)}


async def _leave(client: httpx2.AsyncClient, request: Any, asked: Asked) -> dict[str, Any]:
    """Disconnect after the first line of a stream, or after 0.3 s without streaming."""
    if asked.body["stream"]:
        response = await client.send(request, stream=True)
        async for _ in response.aiter_lines():
            break
        await response.aclose()
        return {"status": response.status_code}
    try:
        async with asyncio.timeout(0.3):
            response = await client.send(request)
    except TimeoutError:
        return {"status": "left"}
    return {"status": response.status_code}


async def ask_all(server: Server, asked: Sequence[Asked], clients: int) -> list[dict[str, Any]]:
    """Send the requests from `clients` concurrent clients, one request at a time each."""
    url = f"{server.url}/v1/chat/completions"

    async def one_client(mine: Sequence[Asked]) -> list[dict[str, Any]]:
        async with httpx2.AsyncClient() as client:
            return [await ask(client, url, request) for request in mine]

    parts = await asyncio.gather(*(one_client(asked[start::clients]) for start in range(clients)))
    return [record for part in parts for record in part]


def judge(record: dict[str, Any], expected: str) -> bool:
    """Return True if the request ended as expected for its kind."""
    if record["kind"] == INNOCENT:
        return record["status"] == 200 and record["text"] == expected
    if record["kind"] == CANCELED:
        return record["status"] in (200, "left")
    contained = record["status"] == "error in the stream"
    return contained or (isinstance(record["status"], int) and 400 <= record["status"] < 500)


def turn(
    server: Server, number: int, arguments: argparse.Namespace, expected: dict[str, str]
) -> dict[str, Any]:
    """Send the requests of one turn and wait until the server is idle."""
    texts = list(expected)
    count = arguments.clients * arguments.requests
    # Consecutive numbers go to different clients, so every client sends every kind.
    asked = [Asked(n, texts[(n + number) % len(texts)]) for n in range(count)]
    began = time.perf_counter()
    records = asyncio.run(ask_all(server, asked, arguments.clients))
    seconds = time.perf_counter() - began
    for record in records:
        text = expected[asked[record["number"]].text]
        record["as_expected"] = judge(record, text)
    wrong = [record for record in records if not record["as_expected"]]
    _wait_until_idle(server)
    found = {
        "requests": Counter(record["kind"] for record in records),
        "as_expected": Counter(r["kind"] for r in records if r["as_expected"]),
        "statuses": Counter(f"{r['kind']}: {r['status']}" for r in records),
        "seconds": seconds,
        "memory_mib": server.memory,
        "wrong": wrong[:10],
    }
    print(json.dumps({key: value for key, value in found.items() if key != "wrong"}), flush=True)
    return found


def _wait_until_idle(server: Server) -> None:
    for _ in range(300):
        now = server.metrics()
        if not (now["hf_spec_running"] or now["hf_spec_queue_length"]):
            return
        time.sleep(0.1)
    raise RuntimeError("the server still runs requests that no client waits for")


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the server, run all turns, and return the record."""
    if arguments.model is None:
        arguments.model = str(folder / "model")
        write_tiny_model(folder / "model")
    model, tokenizer = load_model(arguments.model)
    texts = [f"Write a story about the number {number}." for number in range(20)]
    expected = reference(model, tokenizer, texts, 12)
    del model
    command = [sys.executable, "-m", "hf_spec", "serve", arguments.model, "--device", "cpu"]
    command += ["--strategy", arguments.strategy, "--max-model-len", "512"]
    with served("hf-spec serve", command, arguments.log or folder / "serve.log") as server:
        before = server.memory
        turns = [turn(server, n, arguments, expected) for n in range(arguments.turns)]
        metrics = server.metrics()
    return {
        "environment": environment(),
        "command": sys.argv[1:],
        "memory_mib_before": before,
        "turns": turns,
        "metrics": metrics,
    }


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or Hub id; a tiny random model by default")
    parser.add_argument("--strategy", default="lookup")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=200, help="of each client in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--log", type=Path, help="file for the server's log; kept if it is named")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = arguments_of(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = run(arguments, Path(folder))
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
