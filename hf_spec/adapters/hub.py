"""Adapters on the Hugging Face Hub: names, download and upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from hf_spec.adapters.adapter import Adapter
from hf_spec.adapters.reading import regular_file
from hf_spec.common.errors import AssistantError, HubError, OptionError
from hf_spec.common.hub import check_name, reach_hub

# Files of an adapter's repository; others in its folder are not uploaded.
PUSHED = (
    "README.md",
    "LICENSE",
    "adapter_config.json",
    "adapter_model.safetensors",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
)


@dataclass(frozen=True)
class HubRepo:
    """A repository "owner/name" of the Hub; None for the main branch, and for the stored token."""

    repo_id: str
    revision: str | None = None
    token: str | bool | None = None

    @classmethod
    def of(cls, name: str, revision: str | None = None, token: str | bool | None = None) -> HubRepo:
        """Return that of "owner/name" or "owner/name@revision"; raise for two revisions."""
        repo_id, separator, named = name.partition("@")
        if separator and revision is not None:
            raise AssistantError(
                f"{name!r} names a revision, and revision={revision!r} another one"
            )
        return cls(repo_id, named if separator else revision, token)

    def check(self) -> None:
        """Raise `AssistantError` if the name of the repository is malformed."""
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise AssistantError(
                f"an adapter cannot be pushed to {self.repo_id!r}: {error}"
            ) from error

    def fetch(self, names: Sequence[str]) -> Path:
        """Download those files of `names` that exist; return their folder in the Hub's cache.

        Raises `AssistantError` if there is no such repository, and `HubError` if the Hub cannot be
        reached and its cache does not have the files.
        """
        try:
            check_name(self.repo_id)
            options: dict[str, Any] = {"revision": self.revision, "token": self.token}
            return Path(snapshot_download(self.repo_id, allow_patterns=list(names), **options))
        except OptionError as error:
            raise AssistantError(str(error)) from error
        except LocalEntryNotFoundError as error:
            raise HubError(
                f"adapter {self.repo_id!r} is neither a folder nor in the cache, and the Hub at "
                f"{constants.ENDPOINT} cannot be reached"
            ) from error
        except Exception as error:
            raise AssistantError(
                f"adapter {self.repo_id!r} is neither a folder nor available on the Hub: {error}"
            ) from error


def push_adapter(adapter: Adapter, repo: HubRepo, private: bool = False) -> str:
    """Push the files `PUSHED` of an adapter's folder in one commit; return the URL of the commit.

    The repository (`private` or not) and the branch are created if they are missing. Raises
    `AssistantError` if a file is a link out of the folder or the repository's name is malformed,
    and `HubError` if the Hub cannot be reached or rejects the commit.
    """
    folder = adapter.own_folder
    for name in PUSHED:
        if (folder / name).is_symlink() or (folder / name).exists():
            # A link would upload a file from elsewhere.
            regular_file(folder, name)
    repo.check()
    reach_hub()
    api = HfApi(token=repo.token)
    try:
        repo_id = api.create_repo(repo.repo_id, private=private, exist_ok=True).repo_id
        if repo.revision is not None:
            api.create_branch(repo_id, branch=repo.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=repo.revision,
            allow_patterns=list(PUSHED),
            commit_message=f"hf_spec adapter of method {adapter.method}",
        )
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        raise HubError(f"{folder} cannot be pushed to {repo.repo_id!r}: {error}") from error
    return commit.commit_url
