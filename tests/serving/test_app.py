"""The transformers server with a strategy, called by OpenAI's client."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.conftest import Served, plain, speller

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import httpx2
import openai

from hf_spec.serving import app

CANCELLED, REFUSED, FAILED = (
    f'requests_total{{outcome="{outcome}"}}' for outcome in ("cancelled", "refused", "failed")
)
TEXTS = [f"{one}a{one}e{one}a{one}e" for one in "bcdfghjklmnp"]


def test_answers_are_those_of_plain_generate(served: Served) -> None:
    for text in TEXTS[:3]:
        assert served.text(text) == plain(text)


def test_a_stream_has_the_same_words(served: Served) -> None:
    chunks = list(served.ask(TEXTS[0], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain(TEXTS[0])
    assert len(chunks) > 4, "it came in pieces"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12


def test_many_at_a_time_share_forwards_and_nobody_is_mistaken(
    start: Callable[..., Served],
) -> None:
    served = start(max_batch=4)

    def one(number: int) -> str:
        text = TEXTS[number % len(TEXTS)]
        if number % 2:
            return served.text(text)
        return "".join(c.choices[0].delta.content or "" for c in served.ask(text, stream=True))

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(one, range(24)))
    assert found == [plain(TEXTS[number % len(TEXTS)]) for number in range(24)]
    assert served.metric('requests_total{outcome="answered"}') == 24
    assert served.metric("generated_tokens_total") == 24 * 12
    assert served.metric("target_forwards_total") < served.metric("rounds_total")


def test_greedy_answers_stay_so_beside_drawn_ones(start: Callable[..., Served]) -> None:
    served = start(max_batch=4)
    drawn = {"generation_config": '{"do_sample": true, "temperature": 5.0, "top_k": 0}'}

    def one(number: int) -> str:
        given: dict[str, Any] = {} if number % 2 else {"extra_body": drawn, "temperature": 5.0}
        return served.text(TEXTS[0], **given)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(16)))
    assert set(found[1::2]) == {plain(TEXTS[0])}
    assert len(set(found[::2])) > 2


def test_settings_of_a_request_are_its_own(served: Served) -> None:
    text = plain(TEXTS[0], 20)
    word = text[12:14]
    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(served.ask, TEXTS[0], max_tokens=20, stop=[word])
        whole = pool.submit(served.text, TEXTS[0], max_tokens=20, frequency_penalty=0.3)
    [choice] = stopped.result().choices
    assert choice.finish_reason == "stop"
    expected = plain(TEXTS[0], 20, stop_strings=[word], tokenizer=speller())
    assert choice.message.content == expected != text
    assert whole.result() == plain(TEXTS[0], 20, repetition_penalty=1.3)


def test_the_other_routes_of_text(served: Served) -> None:
    completion = served.client.completions.create(
        model=served.model, prompt=f"user{TEXTS[0]}", max_tokens=12, temperature=0
    )
    assert completion.choices[0].text == plain(TEXTS[0])
    [response] = [
        event.response
        for event in served.client.responses.create(
            model=served.model,
            input=TEXTS[0],
            max_output_tokens=12,
            temperature=0,
            stream=True,
        )
        if event.type == "response.completed"
    ]
    assert response.output[0].content[0].text == plain(TEXTS[0])


class TestCancellation:
    def test_a_client_that_goes_away_frees_its_place(self, served: Served) -> None:
        cancelled, generated = served.metric(CANCELLED), served.metric("generated_tokens_total")
        stream = served.ask(TEXTS[0], max_tokens=200, stream=True)
        pieces = 0
        for chunk in stream:
            pieces += bool(chunk.choices[0].delta.content)
            if pieces == 2:
                break
        stream.close()
        served.wait(lambda: served.metric(CANCELLED) == cancelled + 1)
        assert served.metric("running") == 0
        assert served.metric("generated_tokens_total") < generated + 200
        assert served.text(TEXTS[1]) == plain(TEXTS[1])

    @pytest.mark.full
    def test_one_that_waits_may_go_too(self, served: Served) -> None:
        cancelled = served.metric(CANCELLED)
        long = [served.ask(text, max_tokens=200, stream=True) for text in TEXTS[:2]]
        waits = served.ask(TEXTS[2], stream=True)
        served.wait(lambda: served.metric("queue_length") == 1)
        waits.close()
        served.wait(lambda: served.metric("queue_length") == 0)
        found = ["".join(c.choices[0].delta.content or "" for c in one) for one in long]
        assert found == [plain(text, 200) for text in TEXTS[:2]]
        assert served.metric(CANCELLED) == cancelled + 1


class TestMistakes:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"messages": []}, "messages: .*at least 1 item"),
            ({"messages": "text"}, "messages: .*valid list, not 'text'"),
            ({"messages": [{"content": "no role"}]}, "messages.0.role: Field required"),
            ({"max_tokens": "many"}, "max_tokens: .*integer, not 'many'"),
            ({"max_tokens": 0}, "max_tokens: .*greater than or equal to 1, not 0"),
            ({"extra_body": {"generation_config": "no JSON"}}, "Expecting value"),
            ({"extra_body": {"generation_config": '{"num_beams": 3}'}}, "num_beams=3"),
            ({"stream": True, "max_tokens": -1}, "max_tokens: .*not -1"),
        ],
    )
    def test_are_named_and_not_tried_again(
        self, served: Served, given: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(openai.BadRequestError, match=said):
            served.ask(**given)
        assert served.text(TEXTS[0]) == plain(TEXTS[0])

    def test_a_body_that_is_none(self, served: Served) -> None:
        url = f"{served.url}/v1/chat/completions"
        assert httpx2.post(url, json={"model": served.model}).status_code == 400
        assert httpx2.post(url, content=b"{").status_code == 400
        with pytest.raises(openai.UnprocessableEntityError, match="unheard_of"):
            served.ask(extra_body={"unheard_of": 1})

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_that_fills_the_context(self, served: Served, stream: bool) -> None:
        refused = served.metric(REFUSED)
        with pytest.raises(openai.BadRequestError, match=r"has 301 tokens.* may have 256"):
            served.ask("ba" * 300, stream=stream)
        assert served.metric(REFUSED) == refused + 1

    def test_an_answer_ends_where_the_context_does(self, served: Served) -> None:
        answer = served.ask("babe", max_tokens=100_000)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == 256
        assert answer.choices[0].message.content == plain("babe", 253)

    def test_a_limit_of_ones_own(self, start: Callable[..., Served]) -> None:
        served = start(max_length=20)
        assert served.ask("babe", max_tokens=50).usage.total_tokens == 20
        with pytest.raises(openai.BadRequestError, match="may have 20"):
            served.ask("ba" * 30)

    def test_more_than_may_wait_are_turned_away(self, start: Callable[..., Served]) -> None:
        served = start(max_batch=1, max_waiting=1)
        first = served.ask(TEXTS[0], max_tokens=200, stream=True)
        served.wait(lambda: served.metric("running") == 1)
        second = served.ask(TEXTS[1], stream=True)
        with pytest.raises(openai.RateLimitError, match="1 requests wait already") as refused:
            served.ask(TEXTS[2])
        assert refused.value.response.headers["Retry-After"] == "1"
        first.close()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in second)
        assert text == plain(TEXTS[1])

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_failure_of_the_model_is_no_mistake_of_the_client(
        self, served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        model, failures = served.manager.scheduler.generation.model, served.metric(FAILED)
        with monkeypatch.context() as patch:

            def fails(*_: Any, **__: Any) -> None:
                raise ValueError('the "memory" is full')

            patch.setattr(model.model.norm, "forward", fails)
            with pytest.raises(openai.APIError, match=r"500|during streaming") as failed:
                list(served.ask(TEXTS[0], stream=stream))
        assert not isinstance(failed.value, openai.BadRequestError)
        assert served.metric(FAILED) == failures + 1
        # On the same connections: the client notices which of them the failure has closed.
        for text in TEXTS[:2]:
            assert served.text(text) == plain(text)


class TestHealthAndMetrics:
    def test_health_is_that_of_the_thread_that_answers(self, fresh: Served) -> None:
        assert httpx2.get(f"{fresh.url}/health").json() == {"status": "ok"}
        fresh.manager.stop()
        assert httpx2.get(f"{fresh.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="503 - the server is stopping"):
            fresh.ask()

    def test_responses_are_counted_by_route(self, served: Served) -> None:
        route = 'route="/v1/chat/completions"'
        names = [
            f'http_responses_total{{{route},status="200"}}',
            'http_responses_total{route="none",status="404"}',
        ]
        before = [served.metric(name) for name in names]
        served.text()
        httpx2.get(f"{served.url}/made/up")
        assert [served.metric(name) for name in names] == [count + 1 for count in before]

    def test_they_are_in_the_format_of_prometheus(self, served: Served) -> None:
        prompts = served.metric("prompt_tokens_total")
        served.text("babebibabebiba", max_tokens=40)
        response = httpx2.get(f"{served.url}/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert served.metric("tau") == pytest.approx(
            served.metric("accepted_tokens_total") / served.metric("rounds_total")
        )
        assert served.metric("tokens_per_second") > 0
        assert served.metric("prompt_tokens_total") == prompts + 8


def test_missing_packages_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "is_serve_available", lambda: False)
    with pytest.raises(ValueError, match=r'fastapi, uvicorn and openai.*pip install "\.\[serve\]"'):
        app.check_packages()
