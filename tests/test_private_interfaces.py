"""The table of private interfaces in CONTRIBUTING.md is true, and complete for what a search can find."""

import pkgutil
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titan_fp8moe"
ROWS = re.findall(r"(?m)^\| (`[\w/]+\.py`[^|]*) \| ([^|]*) \| ([^|]*) \|$", (ROOT / "CONTRIBUTING.md").read_text())


def test_rows_name_versions_and_interfaces_that_exist_and_are_used():
    """A class of which attributes are used need not be named in a file."""
    assert len(ROWS) > 20
    for files, names, versions in ROWS:
        assert re.search(r"\d+\.\d+\.\d+", versions)
        text = "".join((PACKAGE / file).read_text() for file in re.findall(r"`([\w/.]+)`", files))
        for name, of_which in re.findall(r"`([\w.]+:[\w.]+)`(, of which)?", names):
            pkgutil.resolve_name(name)
            assert of_which or re.split(r"[.:]", name)[-1] in text, f"{files}: {name}"


def test_private_names_of_torch_are_listed():
    """Those that are written as ``torch._x`` or ``torch.x._y``."""
    listed = " ".join(names for _, names, _ in ROWS)
    for path in PACKAGE.rglob("*.py"):
        if path.name == "compat.py":
            continue
        code = re.sub(r'(?s)""".*?"""|(?m:#.*$)', "", path.read_text())
        for name in re.findall(r"\btorch(?:\.\w+)*?\.(_[a-z]\w*(?:\.\w+)?)", code):
            known = name.split(".")[-1] in listed or name.split(".")[0] in ("_ops", "_dynamo", "_functorch")
            assert known or name.startswith(("_checkpoint", "_fully", "_python_dispatch")), f"{path}: {name}"
