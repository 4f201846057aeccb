"""The site. `make docs` builds it; every warning is an error."""

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "agg")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402
import thumbnails  # noqa: E402

import matrixdp  # noqa: E402

project = "matrixdp"
author = "The matrixdp developers"
copyright = "the matrixdp developers"
release = matrixdp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["gallery/**/*.ipynb", "gallery/**/*.py", "gallery/**/*.json", "gallery/sg_execution_times.rst"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache", "myst.header"]  # generated pages skip a level

html_theme = "furo"
html_title = f"matrixdp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["references.bib"]
html_copy_source = False
smartquotes = False  # options are written with two hyphens
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_google_docstring = True
napoleon_use_ivar = True
default_role = "literal"
CLAIM = re.compile(r"^(Guarantee|Source|Deviates|Optimality):")


sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"(hospital|second_moments|verify|daily_counts)",  # the others need data or minutes
    "image_scrapers": (generate.FigureScraper(),),
    "matplotlib_animations": False,
    "reset_modules": (),
    "capture_repr": (),
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "default_thumb_file": str(HERE / "demo.png"),
    "show_signature": False,
    "plot_gallery": True,
    "remove_config_comments": True,
    "min_reported_time": 10_000,
    "write_computation_times": False,
    "copyfile_regex": r"$^",
    "abort_on_example_error": True,
}


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings are written to be read as text: formulas are no markup, and what is set in after a gap is code."""
    written, last, code, claim = [], 0, None, None
    for place, line in enumerate(lines):
        indent, text = len(line) - len(line.lstrip()), line.strip()
        gap = place > 0 and not lines[place - 1].strip()
        if not text or text.startswith((">>>", "...")):
            claim = claim if text else None
        elif code is not None and indent >= code:
            pass
        elif CLAIM.match(text):  # Guarantee, Source and Deviates: paragraphs of their own
            code, claim = None, " " * indent
            written.append("")
            line = claim + CLAIM.sub(r"**\1:**", _escaped(text))
        elif claim is not None:
            line = claim + _escaped(text)
        elif gap and indent >= last + 4:
            code = indent
            written += [" " * last + "::", ""]
        else:
            code, last, line = None, indent, _escaped(line)
        written.append(line)
    lines[:] = written


def _escaped(line):
    pieces = re.split(r"(`[^`]+`)", line)
    return "".join(p if i % 2 else re.sub(r"([|*]|_(?!\w))", r"\\\1", p) for i, p in enumerate(pieces))


def write_generated(app):
    """Pages that are made from the code: the command line, the errors, the documents."""
    generate.write(HERE / "reference" / "generated")


def draw_thumbnails(app):
    """Pictures of the gallery, after sphinx-gallery has made its own."""
    thumbnails.draw(HERE / "gallery" / "images" / "thumb")


def setup(app):
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)
    app.connect("builder-inited", write_generated, priority=100)
    app.connect("builder-inited", draw_thumbnails, priority=900)
