"""Settings of Sphinx: `make docs` builds the site without a network, and without running a script of the tasks."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docutils import nodes

import lapwing

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "examples" / "tasks"
RESULTS = ROOT / "docs" / "pictures" / "tasks"  # written by tools/gallery.py
REPOSITORY = re.search(r'^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)

project = "lapwing"
author = "lapwing contributors"
version = release = lapwing.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "tasks/sg_execution_times.rst", "sg_execution_times.rst"]
suppress_warnings = [
    "config.cache",  # sphinx-gallery's settings hold a function, which Sphinx cannot store
    "sphinx_gallery.config",  # it finds pictures by path, and needs no backreferences_dir
]

# pages: Markdown that reads the same on GitHub
myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = {"repository": f"[Source code]({REPOSITORY[1]})" if REPOSITORY else ""}
myst_heading_anchors = 4

# docstrings: Google's sections, code in single backticks
default_role = "code"
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Cost", "notes_style"), ("Limits", "notes_style")]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["botorch", "gpytorch", "linear_operator", "lightning", "transformers", "mapie", "ase"]
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

# types of other packages. Their inventories need a network, so docs/inventories lists the few that signatures name
SITES = {
    "matplotlib": "https://matplotlib.org/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
intersphinx_mapping = {name: (url, f"_build/inventories/{name}.inv") for name, url in SITES.items()}
for name in SITES:
    listed = (ROOT / "docs" / "inventories" / f"{name}.txt").read_bytes()
    inventory = ROOT / "docs" / "_build" / "inventories" / f"{name}.inv"
    inventory.parent.mkdir(parents=True, exist_ok=True)
    header = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The rest is compressed by zlib.\n"
    inventory.write_bytes(header.encode() + zlib.compress(listed))

# one page for each script of examples/tasks, in the order of its index
INDEX = (TASKS / "index.rst").read_text(encoding="utf-8")
ORDER = re.findall(r"^   (plot_\w+)$", INDEX, re.MULTILINE)
TITLES = {name: (TASKS / f"{name}.py").read_text(encoding="utf-8").splitlines()[1] for name in ORDER}
sphinx_gallery_conf = {
    "examples_dirs": "../examples/tasks",
    "gallery_dirs": "tasks",
    "copyfile_regex": r"index\.rst",
    "plot_gallery": False,
    "minigallery_sort_order": lambda path: ORDER.index(Path(path).stem),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
}

copybutton_selector = "div:not(.sphx-glr-script-out) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"lapwing {version}"
html_logo = html_favicon = "_static/logo.svg"
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_show_sourcelink = False
if REPOSITORY:
    html_theme_options = {
        "footer_icons": [{"name": "Source", "url": REPOSITORY[1], "html": "Source code", "class": ""}]
    }


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
    if page == "tasks/index":
        text[0] = re.sub(r"\.\. toctree::\n   :hidden:\n\n((?:   plot_\w+\n)+)", with_pictures, text[0])
    elif page.startswith("tasks/"):
        text[0] = with_results(page.removeprefix("tasks/"), text[0])
        text[0] = text[0].replace("benchmarks/README.md", "docs/benchmarks.md")
        text[0] = re.sub(r"\bdocs/([\w/-]+)\.md", r":doc:`/\1`", text[0])


def link_of_include(app: Any, path: Path, page: str, text: list[str]) -> None:
    """Does the same for the READMEs of papers/, which name each other relative to their own folder."""
    text[0] = text[0].replace("](../README.md", "](/papers/verdicts.md")
    text[0] = re.sub(r"\]\((\w+)/README\.md", r"](/papers/\1.md", text[0])
    link_to_pages(app, page, text)


def with_pictures(toctree: re.Match[str]) -> str:
    """Adds the pictures of its scripts to a group of the gallery."""
    scripts = re.sub(r"(plot_\w+)", r"../examples/tasks/\1.py", toctree[1])
    return f"{toctree[0]}\n.. minigallery::\n\n{scripts}\n"


def with_results(script: str, text: str) -> str:
    """Adds what each block of a script printed and drew, from docs/pictures/tasks, below the block."""
    results = json.loads((RESULTS / f"{script}.json").read_text(encoding="utf-8"))
    code = list(re.finditer(r"^\.\. code-block:: Python\n(?:\n|    .*\n)+", text, re.MULTILINE))
    for block, printed, pictures in reversed(list(zip(code, results["printed"], results["pictures"], strict=True))):
        below = "".join(f"\n.. image:: /pictures/tasks/{picture}\n   :alt: {TITLES[script]}\n" for picture in pictures)
        if printed:
            lines = "".join(f"    {line}\n" if line else "\n" for line in printed.splitlines())
            below = f"\n.. rst-class:: sphx-glr-script-out\n\n.. code-block:: none\n\n{lines}\n{below}"
        text = f"{text[: block.end()]}{below}\n{text[block.end() :]}"
    return text


def copy_pictures(app: Any) -> None:
    """Puts the first picture of each script where sphinx-gallery looks for one to shrink."""
    folder = Path(app.srcdir) / "tasks" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for script in ORDER:
        shutil.copy(RESULTS / f"{script}-1.png", folder / f"sphx_glr_{script}_001.png")


def names_of(script: str) -> set[str]:
    """Returns the public names that a script uses; `posterior` is a posterior in all of them."""
    text = (TASKS / f"{script}.py").read_text(encoding="utf-8")
    aliases = {"lw": "lapwing", "posterior": "lapwing.Posterior", "plots": "lapwing.evaluation.plots"}
    used = {f"{aliases[owner]}.{name}" for owner, name in re.findall(r"\b(lw|posterior|plots)\.(\w+)", text)}
    for module, imported in re.findall(r"^from (lapwing\S*) import (.+)$", text, re.MULTILINE):
        used |= {f"{module}.{name}" for name in imported.split(", ")}
    return used


USES = {script: names_of(script) for script in ORDER}
MOST_TASKS = 6
"""Links to tasks below an entry of the reference; the first ones of the gallery are the easiest."""


def link_tasks(name: str, lines: list[str]) -> None:
    """Ends a docstring with the tasks that use its subject."""
    using = [script for script in ORDER if name in USES[script]]
    links = [f":doc:`{TITLES[script].partition(':')[0]} </tasks/{script}>`" for script in using[:MOST_TASKS]]
    if len(using) > MOST_TASKS:
        links.append(f":doc:`and {len(using) - MOST_TASKS} more </tasks/index>`")
    if links:
        lines += ["", f"Tasks that use it: {', '.join(links)}.", ""]


def prepare_docstring(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Writes what reStructuredText needs: `Cost:` as a section, for napoleon, `::` before code, and links to pages.

    An empty line before an attribute's text keeps napoleon from reading "The best y: ..." as a type.
    """
    lines[:] = [re.sub(r"`?\bdocs/([\w/-]+)\.md`?", r":doc:`/\1`", line) for line in lines]
    if kind in ("attribute", "data", "property"):
        lines.insert(0, "")
    for number in range(len(lines) - 1, -1, -1):
        line, following = lines[number], lines[number + 1 : number + 3]
        if section := re.fullmatch(r"(Cost|Limits): (.*)", line):
            end = next((below for below in range(number, len(lines)) if not lines[below].strip()), len(lines))
            rest = [f"    {words.strip()}" for words in lines[number + 1 : end]]
            lines[number:end] = [f"{section[1]}:", f"    {section[2]}", *rest]
        elif line.endswith(":") and " " in line and len(following) == 2 and not following[0]:
            indent = len(line) - len(line.lstrip())
            lines[number] = line + ":" if following[1].startswith(" " * (indent + 4)) else line
    link_tasks(name, lines)


def shorten_defaults(
    app: Any, kind: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Leaves out the arguments of defaults: `tune=BoundedEvidence()` has an entry, which lists them."""
    return signature and re.sub(r"=(\w+)\([^()]+\)", r"=\1()", signature), returned


def link_code(app: Any, tree: nodes.document, page: str) -> None:
    """Turns names such as `lw.fit(...)` and `KFAC` into links to the reference, once in each section."""
    entries = app.env.get_domain("py").objects
    for section in tree.findall(nodes.section):
        linked: set[str] = set()
        parts = (child for child in section.children if not isinstance(child, nodes.section | nodes.title))
        for literal in [literal for part in parts for literal in part.findall(nodes.literal)]:
            found = re.match(r"(?:lw\.|(?=[A-Z]))(\w+)(?:\(.*\))?$", literal.astext())
            name = found and f"lapwing.{found[1]}"
            if name not in entries or name in linked or isinstance(literal.parent, nodes.reference | nodes.title):
                continue
            linked.add(name)
            target = app.builder.get_relative_uri(page, entries[name].docname) + f"#{entries[name].node_id}"
            link = nodes.reference("", "", internal=True, refuri=target)
            literal.replace_self(link)
            link += literal


def finish_page(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Draws letters with a hat in the font of the text, and tells what a link to the page shows elsewhere.

    Fonts for code put a combining mark over the next letter.
    """
    marked = r"(\w[\u0300-\u036f])(?=[^<>]*<)"
    context["body"] = re.sub(marked, r'<span class="marked">\1</span>', context.get("body", ""))
    shown = {"og:title": re.sub(r"<[^>]+>", "", context.get("title", "")), "og:site_name": "lapwing"}
    paragraphs = tree.findall(nodes.paragraph) if tree else ()
    for first in (paragraph for paragraph in paragraphs if isinstance(paragraph.parent, nodes.section)):
        shown["og:description"] = html.escape(first.astext().replace("\n", " "))
        break
    if html_baseurl:
        shown |= {"og:image": f"{html_baseurl}_static/card.png", "twitter:card": "summary_large_image"}
    tags = "".join(f'<meta property="{name}" content="{content}" />\n' for name, content in shown.items())
    context["metatags"] = context.get("metatags", "") + tags


def setup(app: Any) -> None:
    """Connects the functions above to Sphinx."""
    app.connect("builder-inited", copy_pictures, priority=400)  # before sphinx-gallery's 500
    app.connect("doctree-resolved", link_code)
    app.connect("html-page-context", finish_page)
    app.connect("source-read", link_to_pages)
    app.connect("include-read", link_of_include)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon's 500
