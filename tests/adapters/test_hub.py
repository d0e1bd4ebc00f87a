"""Adapters on a loopback Hub: pushing, downloading by revision and token, use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, hf_api
from peft import PeftModel

from hf_spec import AssistantError, SpecAdapter
from hf_spec.adapters.folder import CONFIG_NAME, WEIGHTS_NAME, is_adapter, load_adapter
from hf_spec.adapters.hub import PUSHED, HubRepo, push_adapter
from tests.adapters.local_hub import LocalHub, Repository, local_hub
from tests.adapters.samples import METHODS, drafted, fresh_model, plain, sample, save_sample
from tests.tiny_models import build

ROOT = Path(__file__).parents[2]
TOKEN = "hf_local"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Run a Hub; set constants as HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_DISABLE_XET would."""
    with local_hub(TOKEN) as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hf_api.api, "endpoint", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_sample(tmp_path / "falcon", "falcon")


def push(
    folder: Path,
    name: str,
    token: str | None = TOKEN,
    revision: str | None = None,
    private: bool = False,
) -> str:
    return push_adapter(load_adapter(folder), HubRepo(name, revision, token), private)


class TestPush:
    def test_everything_that_belongs_to_it_arrives(self, hub: LocalHub, folder: Path) -> None:
        (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
        (folder / "notes.txt").write_text("mine alone")
        url = push(folder, "org/falcon")
        repository = hub.repositories["org/falcon"]
        head = repository.branches["main"]
        assert url == f"{hub.url}/org/falcon/commit/{head}"
        files = repository.commits[head]
        names = {
            "README.md",
            CONFIG_NAME,
            WEIGHTS_NAME,
            "custom_generate/generate.py",
            "custom_generate/requirements.txt",
        }
        assert set(files) == {".gitattributes", *names}
        assert all(files[name] == (folder / name).read_bytes() for name in names)
        # The weights are uploaded through LFS, unlike the small files.
        assert list(hub.large.values()) == [files[WEIGHTS_NAME]]
        assert not repository.private

    def test_an_adapter_in_memory(self, hub: LocalHub) -> None:
        sample("sdsat").push_to_hub("org/sdsat", token=TOKEN, private=True)
        repository = hub.repositories["org/sdsat"]
        assert repository.private
        files = repository.commits[repository.branches["main"]]
        assert b"library_name: hf_spec" in files["README.md"]
        assert json.loads(files[CONFIG_NAME])["method"] == "sdsat"

    def test_its_own_card_goes_along(self, hub: LocalHub, folder: Path) -> None:
        (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
        (folder / "LICENSE").write_text("MIT")
        (folder / "notes.txt").write_text("mine alone")
        SpecAdapter.from_pretrained(folder).push_to_hub("org/falcon", token=TOKEN)
        repository = hub.repositories["org/falcon"]
        files = repository.commits[repository.branches["main"]]
        assert b"# Mine" in files["README.md"]
        assert files["LICENSE"] == b"MIT"
        assert "notes.txt" not in files

    def test_a_branch(self, hub: LocalHub, folder: Path) -> None:
        push(folder, "org/falcon")
        push(save_sample(folder, "disco"), "org/falcon", revision="next")
        assert load_adapter("org/falcon").method == "falcon"
        assert load_adapter("org/falcon", revision="next").method == "disco"

    def test_without_a_right_token(self, hub: LocalHub, folder: Path) -> None:
        for token in (None, "hf_other"):
            with pytest.raises(AssistantError, match="cannot be pushed to 'org/falcon'"):
                push(folder, "org/falcon", token=token)
        assert hub.repositories == {}

    @pytest.mark.parametrize("name", ["", "a/b/c", "..", "org/", "org/na me"])
    def test_names_that_are_none(self, hub: LocalHub, folder: Path, name: str) -> None:
        with pytest.raises(AssistantError, match="cannot be pushed"):
            push(folder, name)

    def test_what_is_no_whole_adapter(self, hub: LocalHub, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(AssistantError, match="there is no folder"):
            push(tmp_path / "nowhere", "org/falcon")
        secret = tmp_path / "secret"
        secret.write_text("mine")
        (folder / "README.md").symlink_to(secret)
        with pytest.raises(AssistantError, match="link out of its folder"):
            push(folder, "org/falcon")
        (folder / "README.md").unlink()
        (folder / WEIGHTS_NAME).write_bytes(b"")
        with pytest.raises(AssistantError, match="cannot be read"):
            push(folder, "org/falcon")
        assert hub.requests == []


class TestFetch:
    @pytest.mark.parametrize("method", METHODS)
    def test_every_way_to_load_takes_a_name(
        self, hub: LocalHub, tmp_path: Path, method: str
    ) -> None:
        name = f"org/{method}"
        push(save_sample(tmp_path / method, method), name)
        found = SpecAdapter.from_pretrained(name)
        assert (found.method, found.options, found.repo_id) == (
            method,
            sample(method).options,
            name,
        )
        expected = plain(build("llama"))
        assert torch.equal(drafted(fresh_model(), method, assistant=name), expected)
        model = fresh_model()
        model.load_adapter(name)
        assert torch.equal(drafted(model, method), expected)
        model = PeftModel.from_pretrained(fresh_model(), name)
        assert torch.equal(drafted(model, method), expected)

    def test_revisions(self, hub: LocalHub, folder: Path) -> None:
        first = push(folder, "org/a").rpartition("/")[2]
        push(save_sample(folder, "disco"), "org/a")
        assert load_adapter("org/a").method == "disco"
        assert load_adapter("org/a", revision=first).method == "falcon"
        assert load_adapter(f"org/a@{first}").method == "falcon"
        assert is_adapter(f"org/a@{first}")
        with pytest.raises(AssistantError, match="another one"):
            load_adapter(f"org/a@{first}", revision="main")
        with pytest.raises(AssistantError, match="neither a folder nor"):
            load_adapter("org/a@no-such-branch")
        model = fresh_model()
        expected = plain(model)
        assert torch.equal(drafted(model, "falcon", assistant=f"org/a@{first}"), expected)
        for name, where in (("org/a", {"revision": first}), (f"org/a@{first}", {})):
            model = fresh_model()
            model.load_adapter(name, adapter_kwargs=where)
            assert torch.equal(drafted(model, "falcon"), expected)
        model = PeftModel.from_pretrained(fresh_model(), "org/a", revision=first)
        assert torch.equal(drafted(model, "falcon"), expected)

    def test_private_ones_need_the_token(self, hub: LocalHub, folder: Path) -> None:
        push(folder, "org/secret", private=True)
        with pytest.raises(AssistantError, match="neither a folder nor"):
            load_adapter("org/secret")
        assert not is_adapter("org/secret")
        assert load_adapter("org/secret", token=TOKEN).method == "falcon"
        model = fresh_model()
        model.load_adapter("org/secret", adapter_kwargs={"token": TOKEN})
        assert torch.equal(drafted(model, "falcon"), plain(model))

    def test_code_and_pickles_are_not_even_fetched(self, hub: LocalHub, folder: Path) -> None:
        push(folder, "org/a")
        hub.repositories["org/a"].commit("main", {"adapter_model.bin": b"x", "evil.py": b"x"})
        files = load_adapter("org/a").folder
        assert files is not None
        assert sorted(p.name for p in files.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]

    def test_a_model_is_no_adapter(self, hub: LocalHub, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path / "model")
        push(save_sample(tmp_path / "a", "disco"), "org/model")
        repository = hub.repositories["org/model"]
        files = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
        repository.commits[repository.branches["main"]] = files
        assert not is_adapter("org/model")
        model = fresh_model()
        for assistant in ("org/model", "org/model@main"):
            output = model.generate(
                torch.tensor([[5, 6, 7]]),
                max_new_tokens=4,
                spec_strategy="draft",
                assistant=assistant,
            )
            assert output.shape == (1, 7)

    def test_the_neighbor_that_it_names(self, hub: LocalHub, tmp_path: Path) -> None:
        disco = sample("disco")
        options = {**disco.options, "draft": "../draft"}
        adapter = SpecAdapter("disco", disco.base, options, disco.tensors)
        adapter.push_to_hub("org/disco", token=TOKEN)
        sample("draft").push_to_hub("org/draft", token=TOKEN)
        found = drafted(fresh_model(), "disco", assistant="org/disco")
        assert torch.equal(found, plain(build("llama")))


@pytest.mark.full
def test_with_nothing_but_the_environment(tmp_path: Path) -> None:
    """HF_ENDPOINT is enough in a new process that has not imported hf_spec."""
    build("llama").save_pretrained(tmp_path / "model")
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
prompt, options = torch.tensor([[5, 6, 7] * 4]), dict(max_new_tokens=8, do_sample=False)
plain = model.generate(prompt, **options)
assert "hf_spec" not in sys.modules
found = model.generate(
    prompt, **options, custom_generate="org/falcon", revision="next", trust_remote_code=True,
    return_dict_in_generate=True,
)
assert torch.equal(found.sequences, plain) and found.spec_stats.drafted_tokens > 0
import hf_spec
adapter = hf_spec.SpecAdapter.from_pretrained("org/falcon", revision="next")
print(adapter.push_to_hub("org/copy"))
"""
    with local_hub(TOKEN) as server:
        environment: dict[str, Any] = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        }
        environment.pop("HF_HUB_OFFLINE", None)
        folder = save_sample(tmp_path / "falcon", "falcon")
        files = {name: folder / name for name in PUSHED if (folder / name).is_file()}
        repository = server.repositories["org/falcon"] = Repository(private=True)
        repository.commit("next", {name: path.read_bytes() for name, path in files.items()})
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        copy = server.repositories["org/copy"]
        assert "custom_generate/generate.py" in copy.commits[copy.branches["main"]]


def test_a_repository() -> None:
    assert HubRepo.of("org/a") == HubRepo("org/a")
    assert HubRepo.of("org/a@v1", token="t") == HubRepo("org/a", "v1", "t")
    assert HubRepo.of("org/a", "v1") == HubRepo("org/a", "v1")


def test_two_revisions() -> None:
    with pytest.raises(AssistantError, match="names a revision, and revision='v2' another one"):
        HubRepo.of("org/a@v1", "v2")


@pytest.mark.parametrize("name", ["", "a/b/c", "..", "org/", "org/na me"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(AssistantError, match="cannot be pushed to"):
        HubRepo(name).check()
