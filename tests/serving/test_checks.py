"""Request validation: errors name the invalid setting, and no other request is affected."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import GenerationConfig

from hf_spec import OptionError
from hf_spec.serving.checks import check_config, fit_to_context
from hf_spec.serving.settings import ServeSettings
from tests import tiny_models
from tests.serving.conftest import Served, plain

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import httpx2
import openai

MESSAGES = [{"role": "user", "content": "babebi"}]
HUGE = 99999999


def post(served: Served, body: Any, path: str = "chat/completions") -> Any:
    text = body if isinstance(body, str) else json.dumps({"messages": MESSAGES, **body})
    headers = {"Content-Type": "application/json"}
    url = f"{served.url}/v1/{path}"
    return httpx2.post(url, content=text.encode(), headers=headers, timeout=60)


def configured(**settings: Any) -> dict[str, Any]:
    return {"generation_config": json.dumps(settings), "max_tokens": 3}


FIELDS = [
    ({"stop": [5]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 9}, "stop has 9 strings"),
    ({"stop": ["x"] * 2000}, "stop has 2000 strings"),
    ({"stop": "x" * 65}, "65 characters"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(HUGE): 5}}, "sequence_bias"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias.5"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"n": 1000}, "n: "),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 1e-300}, "temperature=1e-300"),
    ({"top_p": 1.5}, "top_p"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"seed": 2**80}, "seed"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_completion_tokens": True}, "max_completion_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "arguments"),
    ({"tools": 7}, "tools"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "--trust-request-chat-template"),
    ({"chat_template_kwargs": {"padding": "max_length"}}, "padding"),
    ({"chat_template_kwargs": {"tokenize": False}}, "tokenize"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"generation_config": "[1]"}, "generation_config"),
    ({"generation_config": "NaN"}, "generation_config"),
    ({"generation_config": {}}, "generation_config"),
    ({"generation_config": '{"unheard_of": 1}'}, "unheard_of"),
]
CONFIGS = [
    ({"bad_words_ids": [[HUGE]]}, "bad_words_ids"),
    ({"bad_words_ids": [[5.5]]}, "bad_words_ids"),
    ({"bad_words_ids": [[5, 6]] * 4000}, "may have 4096"),
    ({"forced_eos_token_id": HUGE}, "forced_eos_token_id"),
    ({"forced_bos_token_id": HUGE}, "forced_bos_token_id"),
    ({"forced_eos_token_id": [1, -1]}, "forced_eos_token_id"),
    ({"eos_token_id": HUGE}, "eos_token_id"),
    ({"begin_suppress_tokens": [HUGE]}, "begin_suppress_tokens"),
    ({"suppress_tokens": ["x"]}, "suppress_tokens"),
    ({"sequence_bias": [[[5], "x"]]}, "sequence_bias"),
    ({"sequence_bias": [[[HUGE], 1.0]]}, "sequence_bias"),
    ({"sequence_bias": [[[5], float("inf")]]}, "sequence_bias"),
    ({"sequence_bias": [[[5], float("nan")]]}, "sequence_bias"),
    ({"sequence_bias": [5]}, "sequence_bias"),
    ({"do_sample": True, "temperature": 1e-300}, "temperature"),
    ({"do_sample": True, "temperature": "hot"}, "temperature"),
    ({"do_sample": True, "eta_cutoff": float("nan")}, "eta_cutoff"),
    ({"do_sample": True, "top_p": float("nan")}, "top_p"),
    ({"do_sample": True, "top_k": 10**12}, "top_k"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"no_repeat_ngram_size": 10**9}, "no_repeat_ngram_size"),
    ({"num_return_sequences": 10**9}, "num_return_sequences"),
    ({"num_beams": 10**6}, "num_beams"),
    ({"stop_strings": ["x"] * 2000}, "stop has 2000"),
    ({"stop_strings": [5]}, "stop"),
    ({"max_time": float("inf")}, "max_time"),
    ({"spec_strategy": "none"}, "spec_strategy"),
    # Needs an end-of-sequence token, which a request's own config does not have.
    ({"exponential_decay_length_penalty": [1, 2.0]}, "dtype of NoneType"),
]


class TestOneWrongRequest:
    """Invalid requests to one shared server, which must not change other responses."""

    @pytest.fixture(scope="class")
    def shared(self, shared_server: Served) -> Served:
        return shared_server

    @pytest.mark.parametrize(("body", "said"), FIELDS)
    def test_a_field(self, shared: Served, body: dict[str, Any], said: str) -> None:
        response = post(shared, body)
        assert response.status_code == 400, response.text
        assert said in response.json()["error"]["message"]

    @pytest.mark.parametrize(("config", "said"), CONFIGS)
    def test_a_generation_config(self, shared: Served, config: dict[str, Any], said: str) -> None:
        for stream in (False, True):
            response = post(shared, {**configured(**config), "stream": stream})
            assert response.status_code == 400, response.text
            assert said in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("completions", {"prompt": ["a", "b"]}),
            ("completions", {"prompt": ""}),
            ("completions", {"prompt": "ba", "best_of": 3}),
            ("completions", {"prompt": "ba", "max_tokens": 0}),
            ("completions", {}),
            ("responses", {"input": 5}),
            ("responses", {"input": [5]}),
            ("responses", {"input": []}),
            ("responses", {"input": "ba", "max_output_tokens": -1}),
            ("responses", {"input": "ba", "parallel_tool_calls": None}),
            ("systemone", {}),
            ("systemone", {"state": "a", "questions": {"q": {}}}),
        ],
    )
    def test_the_other_endpoints(self, shared: Served, path: str, body: dict[str, Any]) -> None:
        response = httpx2.post(f"{shared.url}/v1/{path}", json=body, timeout=60)
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["error"]["message"]

    @pytest.mark.parametrize(
        "text",
        [
            '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}',
            '{"model": "\\ud800"}',
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "[" * 100_000,
            '{"a": ' * 900 + "1" + "}" * 900,
            "null",
            "",
            "\x00",
            '{"messages": [{"role": "user", "content": "a"}], "seed": ' + "9" * 5000 + "}",
        ],
    )
    def test_a_body(self, shared: Served, text: str) -> None:
        response = post(shared, text)
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["error"]["message"]

    def test_the_others_are_unchanged(self, shared: Served) -> None:
        def innocent(number: int) -> str:
            stream = shared.ask("babebi", max_tokens=200, stream=bool(number % 2))
            if number % 2:
                return "".join(c.choices[0].delta.content or "" for c in stream)
            return str(stream.choices[0].message.content)

        wrong = [body for body, _ in FIELDS]
        wrong += [configured(**config) for config, _ in CONFIGS]
        with ThreadPoolExecutor(12) as pool:
            found = pool.map(innocent, range(6))
            statuses = [r.status_code for r in pool.map(lambda body: post(shared, body), wrong)]
            assert list(found) == [plain("babebi", 200)] * 6
        assert set(statuses) == {400}


@pytest.fixture(scope="module")
def shared_server(folder: Any) -> Any:
    from tests.serving.conftest import starting

    with starting(folder) as begin:
        yield begin(max_batch=8)


class TestLimitsOfTheServer:
    def test_a_body_is_read_up_to_its_limit(self, start: Callable[..., Served]) -> None:
        served = start(max_body=2000)
        long = [{"role": "user", "content": "ba" * 1000}]
        assert post(served, {"messages": long}).status_code == 413

        def chunks() -> Any:
            for _ in range(100):
                yield b" " * 100

        url = f"{served.url}/v1/chat/completions"
        response = httpx2.post(url, content=chunks())
        assert response.status_code == 413
        assert "2000 bytes" in response.json()["error"]["message"]
        assert served.text() == plain("babebi")

    def test_tokens(self, start: Callable[..., Served]) -> None:
        served = start(max_prompt=5, max_tokens=7)
        assert served.ask("babe", max_tokens=7).usage.completion_tokens == 7
        with pytest.raises(openai.BadRequestError, match=r"max_tokens=8: .* may have 7"):
            served.ask("babe", max_tokens=8)
        with pytest.raises(openai.BadRequestError, match=r"has 7 tokens; it may have 5"):
            served.ask("bababababaca", max_tokens=7)
        unlimited = {"model": served.model, "messages": [{"role": "user", "content": "babe"}]}
        answer = served.client.chat.completions.create(**unlimited)
        assert answer.usage.completion_tokens == 7, "the default is shortened"

    def test_templates_where_they_are_allowed(self, start: Callable[..., Served]) -> None:
        served = start(client_templates=True)
        template = {"chat_template_kwargs": {"chat_template": "user{{ messages[0].content }}"}}
        assert served.text("babebi", extra_body=template) == plain("babebi")
        for wrong in ("{{ raise_exception('no') }}", "{% if %}", "{{ messages[0].x.y }}"):
            template["chat_template_kwargs"]["chat_template"] = wrong
            with pytest.raises(openai.BadRequestError):
                served.text("babebi", extra_body=template)

    def test_a_model_without_a_context_has_a_limit(self) -> None:
        model = tiny_models.build("llama")
        config = GenerationConfig(max_new_tokens=10**6)
        fit_to_context(config, model, 10, ServeSettings(max_length=100))
        assert config.max_new_tokens == 90
        with pytest.raises(OptionError, match="has 100 tokens"):
            fit_to_context(config, model, 100, ServeSettings(max_length=100))

    def test_token_ids_end_with_the_vocabulary(self) -> None:
        model = tiny_models.build("llama")
        size = model.config.vocab_size
        check_config(GenerationConfig(suppress_tokens=[size - 1]), model, ServeSettings())
        with pytest.raises(OptionError, match=f"token ids of this model are 0 to {size - 1}"):
            check_config(GenerationConfig(suppress_tokens=[size]), model, ServeSettings())

    def test_settings_of_the_model_itself_are_its_owners(self) -> None:
        model = tiny_models.build("llama")
        own = GenerationConfig(pad_token_id=-1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "generation_config", own)
            check_config(GenerationConfig(pad_token_id=-1), model, ServeSettings())
        with pytest.raises(OptionError, match="pad_token_id=-1"):
            check_config(GenerationConfig(pad_token_id=-1), model, ServeSettings())
