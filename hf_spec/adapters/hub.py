"""Adapters onto the Hugging Face Hub."""

from __future__ import annotations

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from hf_spec.adapters.adapter import Adapter
from hf_spec.adapters.place import Place
from hf_spec.adapters.reading import regular_file
from hf_spec.data.hub import reach_hub
from hf_spec.errors import HubError

# What an adapter's repository is made of; nothing else in a folder is sent.
PUSHED = (
    "README.md",
    "LICENSE",
    "adapter_config.json",
    "adapter_model.safetensors",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
)


def push_adapter(adapter: Adapter, place: Place, private: bool = False) -> str:
    """Put the folder that an adapter was loaded from on the Hub, in one commit.

    Args:
        adapter: its card and its `custom_generate/` go along, other files of the folder do not.
        place: the repository, made if need be, and the branch, made too.
        private: whether a repository that is made is private.

    Returns:
        The address of the commit.

    Raises:
        AssistantError: if a file is not one of the folder, or the name of the repository is none.
        HubError: if the Hub cannot be reached, or refuses.
    """
    folder = adapter.own_folder
    for name in PUSHED:
        if (folder / name).is_symlink() or (folder / name).exists():
            # A link would send what lies elsewhere.
            regular_file(folder, name)
    place.check()
    reach_hub()
    api = HfApi(token=place.token)
    try:
        repo_id = api.create_repo(place.repo_id, private=private, exist_ok=True).repo_id
        if place.revision is not None:
            api.create_branch(repo_id, branch=place.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=place.revision,
            allow_patterns=list(PUSHED),
            commit_message=f"hf_spec adapter of method {adapter.method}",
        )
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        raise HubError(f"{folder} cannot be pushed to {place.repo_id!r}: {error}") from error
    return commit.commit_url
