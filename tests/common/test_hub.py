"""Model names: folders, Hub ids, cached models, and clear errors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoTokenizer

from hf_spec.adapters.folder import load_adapter
from hf_spec.common.errors import AssistantError, HubError, OptionError
from hf_spec.common.hub import check_name, load_named, reach_hub
from hf_spec.methods.draft_model.loading import resolve_draft_model
from tests.adapters.local_hub import LocalHub, Repository, closed_port
from tests.adapters.test_hub import hub  # noqa: F401 - the fixture
from tests.tiny_models import build


@pytest.fixture
def nobody(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> LocalHub:  # noqa: F811
    """Point the Hub address to a closed port, and fail on retries."""
    address = closed_port()
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits to try again"))
    return hub


@pytest.mark.parametrize("name", ["org/name", "gpt2", "a.b/c_d-e"])
def test_ids(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./model", "../model", "~/model", "a/b/c", "model/", "my model"]
)
def test_what_can_only_be_a_folder_is_called_missing(name: str, nobody: LocalHub) -> None:
    for load in (check_name, lambda name: load_named(AutoConfig, name)):
        with pytest.raises(OptionError, match=f"^there is no folder {name}$"):
            load(name)
    with pytest.raises(AssistantError, match=f"^there is no folder {name}$"):
        load_adapter(name)
    with pytest.raises(AssistantError, match=f"there is no folder {name}$"):
        resolve_draft_model("draft", name, build("llama"))


def test_an_empty_name_is_not_the_folder_one_is_in() -> None:
    with pytest.raises(OptionError, match="'' is not a model name; use a folder or a Hub id"):
        check_name("")


def test_files_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(OptionError, match="is a file; use its folder"):
        check_name(str(tmp_path / "model.safetensors"))


def test_a_hub_that_answers(hub: LocalHub) -> None:  # noqa: F811
    reach_hub()
    assert hub.requests == ["HEAD /"]


def test_a_hub_out_of_order(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(
        "tests.adapters.local_hub._Handler._route", lambda *arguments: (503, {}, {})
    )
    with pytest.raises(HubError, match=r"out of order \(status 503\)"):
        reach_hub()


def test_a_hub_that_cannot_be_reached(nobody: LocalHub) -> None:
    for load in (
        lambda: load_named(AutoTokenizer, "org/model"),
        lambda: load_adapter("org/model"),
        lambda: resolve_draft_model("draft", "org/model", build("llama")),
    ):
        with pytest.raises(HubError, match="cannot be reached") as caught:
            load()
        assert "org/model" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_cache_serves_without_a_hub(
    hub: LocalHub,  # noqa: F811
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    build("llama").config.save_pretrained(tmp_path / "model")
    repository = hub.repositories["org/model"] = Repository(private=False)
    repository.commit("main", {"config.json": (tmp_path / "model/config.json").read_bytes()})
    assert load_named(AutoConfig, "org/model").model_type == "llama"
    request.getfixturevalue("nobody")
    asked = len(hub.requests)
    assert load_named(AutoConfig, "org/model").model_type == "llama"
    assert len(hub.requests) == asked
