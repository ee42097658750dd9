"""The documentation site: `make docs` builds it from the pages of the checkout and the docstrings.

The source folder is the checkout's root, so that links between README, docs and bench work as they do in a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.ext.napoleon.docstring import GoogleDocstring

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

project = "pdkernels"
author = "the pdkernels authors"
release = version = (ROOT / "pdkernels/_version.py").read_text().split('"')[1]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "SECURITY.md",
    "bench/notes.md",
]
source_suffix = {".md": "markdown"}
default_role = "py:obj"  # docstrings write `name`

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# A name in backticks becomes a link if it names one thing, and stays as it is if it names several.
suppress_warnings = ["ref.python"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types and shapes are in the docstrings
autodoc_default_options = {"show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Returns", "Source"]  # free text, whose colons do not mark types
# Nor do those in the first line of a property's docstring.
GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end

html_theme = "furo"
html_title = f"pdkernels {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_extra_path = ["start"]  # leads from the site's root to the first page
html_show_copyright = False
html_theme_options = {"light_css_variables": {"color-brand-primary": "#2f5d9b"}}
