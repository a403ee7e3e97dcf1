"""Settings of the pages: `make docs` builds them into build/docs, and every warning is an error."""

import cupy_staged

project = "cupy_staged"
author = "cupy_staged contributors"
copyright = author
version = release = cupy_staged.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"cupy_staged {release}"

# A word in single backticks is a name of this library where there is one, and code where there is none.
default_role = "py:obj"
# Docstrings name the types; annotations say `Any` where an array may be of CuPy or NumPy.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
myst_heading_anchors = 3
