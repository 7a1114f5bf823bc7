"""How Sphinx builds the lessons, the guide and the reference; `book.py` runs it."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

import ppedu

project = "ppedu"
author = "The ppedu authors"
copyright = f"2026, {author}"
version = release = ppedu.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # fields of classes, which are documented themselves, too
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "ppedu"
html_baseurl = "https://ppedu.github.io/ppedu/book/"
html_show_sourcelink = html_copy_source = html_show_sphinx = False
suppress_warnings = ["myst.xref_missing", "mystnb.unknown_mime_type"]

# An entry of a list, which our docstrings write as `name: text`, with its further lines indented.
NAME = r'(?:"[\w-]+"|[.][a-z]+(?: [.][a-z]+)*|[a-z_*][\w*]*)'
ENTRY = re.compile(rf"({NAME}(?:, {NAME})*): (?=.)")


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("autodoc-process-docstring", as_lists, priority=400)  # before napoleon, at 500


def mathml(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without a script."""
    translator.body.append(convert(node.astext(), display="block" if isinstance(node, nodes.math_block) else "inline"))
    raise nodes.SkipNode


def as_lists(_app: Any, _kind: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Mark the entries and the examples of a docstring as reStructuredText wants it."""
    made: list[str] = []
    inside = ""  # "entry" or "example"
    for line in lines:
        indented = line.startswith("    ")
        if found := ENTRY.match(line):
            made += ["", f"* ``{found[1]}``: {line[found.end() :]}"]
            inside = "entry"
        elif inside == "entry" and indented:
            made += [*([""] if line.lstrip().startswith("- ") else []), line[2:]]
        elif indented and not inside and made and not made[-1]:
            made += ["::", "", line]
            inside = "example"
        elif inside == "example" and (indented or not line):
            made.append(line)
        else:
            made += ["", line] if inside and line else [line]
            inside = ""
    lines[:] = made
