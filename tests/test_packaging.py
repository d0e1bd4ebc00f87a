"""setup.cfg matches the files; archive and wheel are complete, lightweight and working."""

from __future__ import annotations

import configparser
import statistics
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.installed import PACKAGES, ROOT, Built, User


def read_setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def packages_under(folder: Path) -> set[str]:
    """Return the dotted names of a package and its subpackages: every folder with a module."""
    modules = (path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    return {".".join(path.parent.relative_to(folder.parent).parts) for path in modules}


def test_setup_cfg_names_every_package() -> None:
    named = set(read_setup_cfg()["options"]["packages"].split())
    on_disk = {name for root in PACKAGES for name in packages_under(ROOT / root)}
    assert named == on_disk


def test_every_package_has_an_init() -> None:
    missing = [
        name
        for name in packages_under(ROOT / "hf_spec")
        if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()
    ]
    assert not missing


def test_pyproject_leaves_the_package_to_setup_cfg() -> None:
    assert "[project]" not in (ROOT / "pyproject.toml").read_text().splitlines()
    assert not [name for name in read_setup_cfg().sections() if "tool" in name]


def files_on_disk() -> set[str]:
    """Return every file of the packages, as an import would find it."""
    found = set()
    for root in PACKAGES:
        folder = ROOT / root
        for path in folder.rglob("*"):
            name = path.relative_to(folder.parent).as_posix()
            if path.is_file() and path.suffix != ".pyc":
                found.add(name)
    return found


class TestBuilt:
    def test_the_wheel_has_every_file_of_the_packages(self, built: Built) -> None:
        with zipfile.ZipFile(built.wheel) as wheel:
            names = set(wheel.namelist())
        assert {name for name in names if ".dist-info/" not in name} == files_on_disk()
        assert any(name.endswith("licenses/LICENSE") for name in names)

    def test_the_source_archive_says_what_it_leaves_out(self, built: Built) -> None:
        with tarfile.open(built.archive) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert names >= {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg"}
        assert not [name for name in names if name.startswith("tests")]

    def test_the_metadata(self, built: Built) -> None:
        with zipfile.ZipFile(built.wheel) as wheel:
            [name] = (name for name in wheel.namelist() if name.endswith("/METADATA"))
            lines = wheel.read(name).decode().splitlines()
        config = read_setup_cfg()
        assert f"Version: {config['metadata']['version']}" in lines
        extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra:")}
        assert extras == set(config["options.extras_require"])
        needed = [line for line in lines if line.startswith("Requires-Dist") and ";" not in line]
        assert len(needed) == len(config["options"]["install_requires"].split())


RUN = """
import sys, torch, hf_spec, hf_spec_kernels
from transformers import LlamaConfig, LlamaForCausalLM
from hf_spec.common.prompts import load_prompts
from hf_spec.drafting.rank_tree import published_trees
for package in (hf_spec, hf_spec_kernels):
    assert package.__file__.startswith(sys.prefix), package.__file__
assert load_prompts() and published_trees("falcon")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config).eval()
prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
options = {"max_new_tokens": 8, "do_sample": False}
found = model.generate(prompt, **options, spec_strategy="lookup")
assert found.tolist() == model.generate(prompt, **options).tolist()
"""

# CPU time, which other load hardly affects; both imports run in one process.
IMPORT = """
import sys, time
start = time.process_time()
from transformers import GenerationMixin
middle = time.process_time()
import hf_spec
print((time.process_time() - start) / (middle - start))
print(*{"peft", "bitsandbytes", "matplotlib", "typer", "gguf", "gradio"} & set(sys.modules))
"""


@pytest.mark.full
class TestInstalled:
    @pytest.fixture
    def user(self, programs: Path, tmp_path: Path) -> User:
        return User(programs, tmp_path, {})

    def test_it_runs(self, user: User) -> None:
        user.python(RUN)

    def test_importing_is_silent_and_cheap(self, user: User) -> None:
        """Importing both takes less than 1.5x the time of transformers' generation module alone."""
        ratios = []
        for _ in range(3):
            done = user.run("python", "-c", IMPORT)
            ratio, optional = done.stdout.splitlines()
            assert optional + done.stderr == ""
            ratios.append(float(ratio))
        assert statistics.median(ratios) < 1.5, ratios
