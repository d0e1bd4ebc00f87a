"""Sphinx configuration: `sphinx-build -W docs OUT` builds the pages and the API reference."""

from importlib.metadata import version as installed_version

# Adds the GenerationMixin methods that a page documents, even if that page is built alone.
import hf_spec  # noqa: F401

project = "hf-spec"
version = release = installed_version("hf-spec")
html_title = f"hf-spec {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["hf_spec.css"]
html_show_copyright = False

# Links to headings, such as page.md#a-heading, with the anchors that GitHub generates.
myst_heading_anchors = 3

# The pages of docs/api/ list their members. Docstrings are Google style, types are in signatures.
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
