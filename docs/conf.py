"""Sphinx configuration; the build is warning-free and needs no network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import dramatiq_durable

project = "dramatiq-durable"
author = "the dramatiq-durable contributors"
copyright = "2026, the dramatiq-durable contributors"
version = release = dramatiq_durable.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "durable_docs"]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_use_param = False
napoleon_custom_sections = [("Actor options", "params_style")]

html_theme = "furo"
html_title = "dramatiq-durable"
html_static_path = ["_static"]
html_css_files = ["durable.css"]
