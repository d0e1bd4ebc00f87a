"""The code that travels with an adapter: `custom_generate/`, for users who have not met hf_spec.

    model.generate(**inputs, custom_generate="org/adapter", trust_remote_code=True)

transformers copies the file below out of the repository and calls its function `generate`; only
this, and only with `trust_remote_code=True`, ever runs it. The file is the same in every adapter.
All it does is to hand over to `hf_spec.custom_generate`.
"""

from __future__ import annotations

from pathlib import Path

from hf_spec.files import written_whole
from hf_spec.installing import how_to_install

FOLDER = "custom_generate"
FILES = {
    "generate.py": '''\
"""Generates with this adapter: custom_generate=<its repository>, trust_remote_code=True.

Needs the package hf-spec (see requirements.txt), which does the work.
"""

from hf_spec import custom_generate as generate

__all__ = ["generate"]
''',
    "requirements.txt": f"# To install it, {how_to_install()}.\nhf-spec>=0.1\n",
}


def write_custom_generate(folder: Path) -> None:
    """Write the files to an adapter's `folder`."""
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    for name, text in FILES.items():
        with written_whole(target / name) as part:
            part.write_text(text, encoding="utf-8")
