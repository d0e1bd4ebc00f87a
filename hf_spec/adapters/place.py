"""Repositories of the Hugging Face Hub at a revision: where adapters come from and go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from hf_spec.data.hub import check_name
from hf_spec.errors import AssistantError, HubError, OptionError


@dataclass(frozen=True)
class Place:
    """A repository of the Hub at a revision.

    Attributes:
        repo_id: "owner/name".
        revision: branch, tag or commit; None for the main branch.
        token: None for the stored one.
    """

    repo_id: str
    revision: str | None = None
    token: str | bool | None = None

    @classmethod
    def of(cls, name: str, revision: str | None = None, token: str | bool | None = None) -> Place:
        """The place that "owner/name" or "owner/name@revision" stands for.

        No Hub id has an "@" in it, so there is no doubt about what it means.

        Raises:
            AssistantError: if two revisions are given.
        """
        repo_id, separator, named = name.partition("@")
        if separator and revision is not None:
            raise AssistantError(
                f"{name!r} names a revision, and revision={revision!r} another one"
            )
        return cls(repo_id, named if separator else revision, token)

    def check(self) -> None:
        """Refuse a name that no repository can have.

        Raises:
            AssistantError: says why.
        """
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise AssistantError(
                f"an adapter cannot be pushed to {self.repo_id!r}: {error}"
            ) from error

    def fetch(self, names: Sequence[str]) -> Path:
        """The folder of the Hub's cache with the files called `names`, those that exist.

        Raises:
            AssistantError: if there is no such repository, or folder.
            HubError: if the Hub cannot be reached, and its cache does not have the files.
        """
        try:
            check_name(self.repo_id)
            return Path(
                snapshot_download(
                    self.repo_id,
                    revision=self.revision,
                    token=self.token,
                    allow_patterns=list(names),
                )
            )
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
