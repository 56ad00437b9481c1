"""In every process of the tests tyro reads the sources of settings once, which is three quarters of a parse."""

import functools

from tyro import _docstrings

_docstrings.get_field_docstring = functools.cache(_docstrings.get_field_docstring)
