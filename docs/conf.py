"""Settings of Sphinx: `make docs` builds the site, and `make docs GALLERY=1` also runs the scripts of the tasks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lapwing

project = "lapwing"
author = "lapwing contributors"
version = release = lapwing.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["_build", "tasks/sg_execution_times.rst", "sg_execution_times.rst"]
suppress_warnings = ["config.cache"]  # sphinx-gallery's settings hold classes, which Sphinx cannot store

# pages: Markdown that reads the same on GitHub
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# docstrings: Google's sections, code in single backticks
default_role = "code"
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Cost", "notes_style"), ("Limits", "notes_style")]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["botorch", "gpytorch", "linear_operator", "lightning", "transformers", "mapie"]
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

# one page for each script of examples/tasks
sphinx_gallery_conf = {
    "examples_dirs": "../examples/tasks",
    "gallery_dirs": "tasks",
    "filename_pattern": "plot_",
    "within_subsection_order": "ExampleTitleSortKey",
    "plot_gallery": os.environ.get("GALLERY", "") == "1",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "capture_repr": (),
}

html_theme = "furo"
html_title = f"lapwing {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_show_sourcelink = False


PAGES = (
    (r"examples/tasks/(\w+)\.py", r"/tasks/\1.rst"),
    (r"examples/tasks/(?=\))", "/tasks/index.rst"),
    (r"benchmarks/README\.md", "/benchmarks.md"),
    (r"docs/([\w/-]+)\.md", r"/\1.md"),
    (r"papers/README\.md", "/papers/verdicts.md"),
    (r"papers/(\w+)/README\.md", r"/papers/\1.md"),
    (r"CHANGELOG\.md", "/changelog.md"),
)
"""Files outside docs/ that are pages of the site: path in the repository, page."""


def link_to_pages(app: Any, page: str, text: list[str]) -> None:
    """Turns what works on GitHub into links of the site: links to files outside docs/, and pages that a task names."""
    for path, target in PAGES:
        text[0] = re.sub(rf"\]\((?:\.\./)+{path}", rf"]({target}", text[0])
    if page.startswith("tasks/"):
        text[0] = text[0].replace("benchmarks/README.md", "docs/benchmarks.md")
        text[0] = re.sub(r"\bdocs/([\w/-]+)\.md", r":doc:`/\1`", text[0])


def link_of_include(app: Any, path: Path, page: str, text: list[str]) -> None:
    """Does the same for the READMEs of papers/, which name each other relative to their own folder."""
    text[0] = text[0].replace("](../README.md", "](/papers/verdicts.md")
    text[0] = re.sub(r"\]\((\w+)/README\.md", r"](/papers/\1.md", text[0])
    link_to_pages(app, page, text)


def prepare_docstring(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Writes what reStructuredText needs: `Cost:` as a section, for napoleon, and `::` before code."""
    for number in range(len(lines) - 1, -1, -1):
        line, following = lines[number], lines[number + 1 : number + 3]
        if section := re.fullmatch(r"(Cost|Limits): (.*)", line):
            end = next((below for below in range(number, len(lines)) if not lines[below].strip()), len(lines))
            rest = [f"    {words.strip()}" for words in lines[number + 1 : end]]
            lines[number:end] = [f"{section[1]}:", f"    {section[2]}", *rest]
        elif line.endswith(":") and " " in line and len(following) == 2 and not following[0]:
            indent = len(line) - len(line.lstrip())
            lines[number] = line + ":" if following[1].startswith(" " * (indent + 4)) else line


def setup(app: Any) -> None:
    """Connects the functions above to Sphinx."""
    app.connect("source-read", link_to_pages)
    app.connect("include-read", link_of_include)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon's 500
