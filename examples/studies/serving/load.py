"""Servers under load: 32 concurrent requests, including canceled and malformed ones.

Four servers with the same model run on 127.0.0.1: `transformers serve`, the same with continuous
batching, and `hf-spec serve` without drafting and with a strategy. They take turns; the first two
may get a smaller number of requests (`--beside`). Of every ten requests, one is canceled after its
first words, one is malformed, and one has a prompt beyond the length limit. The others are greedy,
half of them streaming. Each request must end as expected, and each complete answer must equal plain
`generate()` in this process. The transformers server has no length limit, so it gets no such
prompts. All counts and times are bounded.

For usage, run `python -m examples.studies.serving.load --help`; requires the extra `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx2
import openai
import psutil

from examples.studies.models import load_model
from hf_spec.common.machine import environment
from hf_spec.common.prompts import load_prompts
from hf_spec.common.tables import Table

PLAIN, BATCHED, UNDRAFTED, SPECULATIVE = NAMES = (
    "transformers serve",
    "transformers serve --continuous-batching",
    "hf-spec serve --strategy none",
    "hf-spec serve",
)
OURS = (UNDRAFTED, SPECULATIVE)
WHOLE, STREAM, CANCELLED, MALFORMED, TOO_LONG = KINDS = (
    "whole",
    "stream",
    "cancelled",
    "malformed",
    "too long",
)
ANSWERED = (WHOLE, STREAM)
# Timeouts in seconds: to start a server, and for one request including its time in the queue.
START_SECONDS, REQUEST_SECONDS = 120, 300
MIB = 2**20


@dataclass(frozen=True)
class Asked:
    """Request with its number and kind."""

    number: int
    kind: str
    text: str


@dataclass(frozen=True)
class Server:
    """Server process started by this study."""

    name: str
    url: str
    process: psutil.Process

    @property
    def memory(self) -> float:
        """Resident memory of the server and its child processes, in MiB."""
        everybody = [self.process, *self.process.children(recursive=True)]
        return sum(one.memory_info().rss for one in everybody) / MIB

    def metrics(self) -> dict[str, float]:
        """Return the values of `/metrics` by name and labels."""
        lines = httpx2.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def kind_of(number: int) -> str:
    """Return the kind of a request; of every ten, seven are answered."""
    return {3: CANCELLED, 6: MALFORMED, 9: TOO_LONG}.get(
        number % 10, STREAM if number % 2 else WHOLE
    )


def requests(texts: Sequence[str], count: int) -> list[Asked]:
    """Return `count` requests that cycle through the texts."""
    return [Asked(n, kind_of(n), texts[n % len(texts)]) for n in range(count)]


@contextmanager
def served(name: str, command: Sequence[str], log: Path) -> Iterator[Server]:
    """Start a server on a free port, wait until it responds, and stop it on exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"{url}/health", log)
            yield Server(name, url, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(START_SECONDS * 4):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
        try:
            if httpx2.get(url, timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.25)
    raise RuntimeError(f"no answer from {url} within {START_SECONDS} s: {log.read_text()[-2000:]}")


async def ask_all(
    server: Server, model: str, asked: Sequence[Asked], streams: int, new_tokens: int
) -> list[dict[str, Any]]:
    """Send the requests, at most `streams` at a time, and return a record for each."""
    slots = asyncio.Semaphore(streams)
    limits = httpx2.Limits(max_connections=streams)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=REQUEST_SECONDS,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits),
    ) as client:

        async def one(request: Asked) -> dict[str, Any]:
            async with slots:
                asking = ask(client, model, request, new_tokens)
                return await asyncio.wait_for(asking, REQUEST_SECONDS)

        return list(await asyncio.gather(*map(one, asked)))


async def ask(client: Any, model: str, request: Asked, new_tokens: int) -> dict[str, Any]:
    """Send one request and return a record with status, text and times."""
    began = time.perf_counter()
    found: dict[str, Any] = {"number": request.number, "kind": request.kind, "status": 200}
    try:
        found |= await _answer(client, model, request, new_tokens, began)
    except openai.APIStatusError as error:
        found["status"] = error.status_code
    except openai.APIError as error:
        found["status"] = f"{type(error).__name__}: {error}"
    return {**found, "seconds": time.perf_counter() - began}


async def _answer(
    client: Any, model: str, request: Asked, new_tokens: int, began: float
) -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": request.text}]
    if request.kind == MALFORMED:
        messages = [[], "no list", [{"content": "no role"}]][request.number // 10 % 3]
    given = {"model": model, "messages": messages, "max_tokens": new_tokens, "temperature": 0}
    if request.kind in (WHOLE, MALFORMED, TOO_LONG):
        answer = await client.chat.completions.create(**given)
        return {"text": answer.choices[0].message.content}
    pieces: list[str] = []
    first = None
    async with await client.chat.completions.create(**given, stream=True) as stream:
        async for chunk in stream:
            if not (piece := chunk.choices[0].delta.content):
                continue
            first = first or time.perf_counter() - began
            pieces.append(piece)
            if request.kind == CANCELLED and len(pieces) == 2:
                break
    return {"text": "".join(pieces), "first_seconds": first}


def reference(model: Any, tokenizer: Any, texts: Sequence[str], new_tokens: int) -> dict[str, str]:
    """Return the answers of plain `generate()` by text."""
    found = {}
    for text in texts:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        answer = output[0, inputs["input_ids"].shape[1] :]
        found[text] = tokenizer.decode(answer, skip_special_tokens=True)
    return found


def judge(record: dict[str, Any], asked: Asked, expected: str) -> bool:
    """Return True if the request ended as expected for its kind."""
    if record["kind"] in ANSWERED:
        return record["status"] == 200 and record["text"] == expected
    if record["kind"] == CANCELLED:
        return record["status"] == 200 and expected.startswith(record["text"])
    return isinstance(record["status"], int) and record["status"] in (400, 422)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentiles."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def summary(records: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the outcomes of the requests of one server and the latencies of its answers."""
    answered = [r for r in records if r["kind"] in ANSWERED]
    firsts = [r["first_seconds"] for r in answered if r.get("first_seconds") is not None]
    return {
        "requests": len(records),
        "kinds": Counter(r["kind"] for r in records),
        "as_expected": sum(r["as_expected"] for r in records),
        "statuses": Counter(f"{r['kind']}: {r['status']}" for r in records),
        "seconds": seconds,
        "answered_per_second": len(answered) / seconds,
        "answer_seconds": percentiles([r["seconds"] for r in answered]),
        "first_words_seconds": percentiles(firsts),
    }


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """Return the summaries as a Markdown table."""
    head = ["", "requests", "as expected", "answers per second", "answer p50", "p90", "p99"]
    rows = [
        [
            name,
            str(found["requests"]),
            str(found["as_expected"]),
            f"{found['answered_per_second']:.2f}",
            *(f"{value:.2f} s" for value in found["answer_seconds"].values()),
        ]
        for name, found in summaries.items()
    ]
    return Table(head, rows).markdown()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, send them the requests in turns, and return the record."""
    model, tokenizer = load_model(arguments.model)
    texts = [prompt.turns[0][: arguments.letters] for prompt in load_prompts()][: arguments.prompts]
    expected = reference(model, tokenizer, texts, arguments.new_tokens)
    del model
    asked = requests(texts, arguments.requests)
    # Every word is at least one token, so this exceeds the limit.
    endless = "the cat sat on the mat, " * arguments.max_length
    asked = [Asked(a.number, a.kind, endless) if a.kind == TOO_LONG else a for a in asked]
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    seconds = dict.fromkeys(records, 0.0)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(served(name, command, arguments.logs / f"serve_{index}.log"))
            for index, (name, command) in enumerate(commands(arguments).items())
        ]
        # The first value is the memory before any request.
        memory = {server.name: [server.memory] for server in servers}
        for part in parts(asked, arguments.parts):
            for server in servers:
                mine = share(server.name, part, arguments)
                began = time.perf_counter()
                given = (server, arguments.model, mine, arguments.streams, arguments.new_tokens)
                found = asyncio.run(ask_all(*given))
                seconds[server.name] += time.perf_counter() - began
                for record, request in zip(found, mine, strict=True):
                    text = expected.get(request.text, "")
                    record["as_expected"] = judge(record, request, text)
                records[server.name] += found
                memory[server.name].append(_idle(server).memory)
        metrics = servers[-1].metrics()
    return {
        "environment": environment(),
        "command": sys.argv[1:],
        "servers": {name: summary(records[name], seconds[name]) for name in records},
        "memory_mib_before_and_after_each_part": memory,
        "metrics": metrics,
        "records": records,
    }


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each server, without its address."""
    ours = [sys.executable, "-m", "hf_spec", "serve", arguments.model, "--device", "cpu"]
    ours += [
        "--max-num-seqs",
        str(arguments.max_batch),
        "--max-model-len",
        str(arguments.max_length),
    ]
    undrafted = [*ours, "--strategy", "none"]
    ours += ["--strategy", arguments.strategy]
    for name in arguments.assistant:
        ours += ["--assistant", name]
    theirs = "from transformers.cli.transformers import main; main()"
    plain = [sys.executable, "-c", theirs, "serve", arguments.model]
    plain += ["--device", "cpu", "--dtype", "float32"]
    # By default it reserves more than half of the memory of a CPU machine for its KV cache.
    batched = [*plain, "--continuous-batching", "--cb-num-blocks", "256"]
    batched += ["--cb-max-batch-tokens", "512"]
    return {PLAIN: plain, BATCHED: batched, UNDRAFTED: undrafted, SPECULATIVE: ours}


def share(name: str, part: Sequence[Asked], arguments: argparse.Namespace) -> list[Asked]:
    """Return the requests of a part for a server; transformers gets no overlong prompts."""
    if name in OURS:
        return list(part)
    count = arguments.beside or arguments.requests
    return [a for a in part[: -(-count // arguments.parts)] if a.kind != TOO_LONG]


def parts(asked: Sequence[Asked], count: int) -> list[Sequence[Asked]]:
    """Split the requests into `count` consecutive parts."""
    size = -(-len(asked) // count)
    return [asked[start : start + size] for start in range(0, len(asked), size)]


def _idle(server: Server) -> Server:
    """Return the server once it is idle; a transformers server is returned immediately."""
    if server.name in OURS:
        for _ in range(200):
            now = server.metrics()
            if not (now["hf_spec_running"] or now["hf_spec_queue_length"]):
                return server
            time.sleep(0.1)
        raise RuntimeError("the server still runs requests that no client waits for")
    return server


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--assistant", action="append", default=[])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--beside", type=int, help="of these, those to transformers' own servers")
    parser.add_argument("--streams", type=int, default=32, help="requests under way")
    parser.add_argument("--parts", type=int, default=4, help="turns of each server")
    parser.add_argument("--prompts", type=int, default=20, help="different ones")
    parser.add_argument("--letters", type=int, default=300, help="longest prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--logs", type=Path, default=Path(), help="folder for the servers' logs")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = arguments_of(argv)
    # All servers run under the same conditions and do not contact the Hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = run(arguments)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found["servers"]))


if __name__ == "__main__":
    main()
