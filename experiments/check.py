"""Checks for ``python -m experiments.tables``: one source gives each figure in the text of a page, and no other may.

* A figure is a number before one of :data:`UNITS`, also in a list or range that ends in one ("1 to 2%"), or a decimal
  fraction. Code, links, names with versions and generated tables hold none.
* ``figures.toml`` has a section for each page. A line is a fragment of it, with ``{}`` in the place of each figure, and
  an expression for each. Every figure needs a line, and every line one place on its page.
* An expression computes with keys of records (:class:`Key`), figures of others (``published.toml``), or a number of
  the code (:func:`code`). Tables alone show ``dry_runs.json``, which a test repeats.
"""

import functools
import json
import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HERE = ROOT / "experiments"
Record = dict

MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
NUMBER = rf"[+{MINUS}]?\d+(?:,\d{{3}})*(?:\.\d+)?"
UNITS = r"(?:x|%| ?(?:times|tokens/s|TFLOP/s|[GT]B/s|[GK]iB|ms|µs|s))(?![\w/])"
JOINED = rf"(?:, |; | to | and | or | / | ± | {DASH} )"
FIGURE = re.compile(rf"(?<![\w.,/-])(?:{NUMBER}(?=(?:{JOINED}{NUMBER})*{UNITS})|[+{MINUS}]?\d[\d,]*\.\d+(?![\w.]*\w))")
VERSION = r"0\.(?:[23]|18|2[12])|2\.(?:1[1-6]|20)|3\.(?:[6-9]|1[123])|5\.(?:17|2[34])|8\.9|(?:9|10|12|13)\.0|13\.\d"
NO_FIGURES = re.compile(
    r"```.*?```|(?<=\n\n)(?:    [^\n]*\n)+|`[^`]*`|\]\([^)]*\)|https?://\S+|arXiv \S+|"
    rf"(?<![\w.])(?:{VERSION})(?![\w%]|[,.]\d|{UNITS})",
    re.DOTALL,
)
TABLE = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)


def hidden(text: str, *patterns: re.Pattern) -> str:
    """The text with all that matches a pattern blotted out."""
    for pattern in patterns:
        text = pattern.sub(lambda match: "~" * len(match[0]), text)
    return text


class Key(list):
    """The records of a key. Of a single one the fields are attributes."""

    def __init__(self, records: list[Record], **fields: str):
        """The newest run of each name and shape, of the records whose ``fields`` match these patterns."""
        found = [r for r in records if all(fnmatchcase(r.get(field, ""), pattern) for field, pattern in fields.items())]
        super().__init__(newest(found))
        if not self:
            raise LookupError(f"no record has {fields}")

    def __getattr__(self, field: str) -> Any:
        (record,) = self
        return record[field]

    @property
    def low(self) -> float:
        """The smallest speedup, as over the strongest of several references."""
        return min(r["speedup"] for r in self)

    @property
    def low_busy(self) -> float:
        """The smallest ratio of the times in which kernels run."""
        return min(r["reference_gpu_busy"] / r["gpu_busy"] for r in self)

    @property
    def high(self) -> float:
        return max(r["speedup"] for r in self)


def place(record: Record) -> tuple[str, str]:
    return record["name"], record["shape"]


def newest(records: list[Record], of: Callable[[Record], Any] = place) -> list[Record]:
    """The records of the newest run of each name and shape; of one date, the run that was written last."""
    last: dict[Any, tuple[str, ...]] = {}
    for r in records:
        if r["date"] >= last.get(of(r), ("",))[0]:
            last[of(r)] = run(r)
    return [r for r in records if run(r) == last[of(r)]]


def run(record: Record) -> tuple[str, ...]:
    return record["date"], record["commit"], record["hardware"]


@functools.cache
def source(name: str) -> dict[str, Any]:
    """``figures.toml``, ``published.toml`` or ``dry_runs.json``."""
    if name == "dry_runs":
        return json.loads((HERE / f"{name}.json").read_text())
    return tomllib.loads((HERE / f"{name}.toml").read_text())


def code(path: str, before: str) -> float:
    """The number behind a text that a file has once."""
    (number,) = re.findall(re.escape(before) + r"(\d[\d.e-]*)", (ROOT / path).read_text())
    return float(number)


class Ledger:
    """The lines of each page, and the names that their expressions may have."""

    def __init__(self, records: list[Record]):
        ledger = source("figures")
        self.pages: dict[str, dict[str, list[str]]] = ledger["pages"]
        self.keys = {name: Key(records, **fields) for name, fields in ledger["records"].items()}
        self.names = self.keys | {name: row["value"] for name, row in source("published").items()} | {"code": code}

    def unused(self) -> list[str]:
        """Keys of records that no line has, and sections without a page."""
        expressions = [each for lines in self.pages.values() for of in lines.values() for each in of]
        words = set(re.findall(r"\w+", " ".join(expressions)))
        return [*(self.keys.keys() - words), *(name for name in self.pages if not (ROOT / name).exists())]

    def page(self, name: str, text: str) -> tuple[str, list[str]]:
        """The text with the figures of its sources, and errors."""
        errors, values = [], {}
        for fragment, expressions in self.pages.get(name, {}).items():
            places = list(pattern(fragment).finditer(text))
            if len(places) != 1:
                errors.append(f"{len(places)} places have the ledger's {fragment!r}")
                continue
            for i, expression in enumerate(expressions, 1):
                value = eval(expression, self.names)
                values[places[0].span(i)] = printed(value, places[0][i])
        starts = {start for start, _ in values}
        for figure in FIGURE.finditer(hidden(text, TABLE, NO_FIGURES)):
            if figure.start() not in starts:
                around = " ".join(text[max(0, figure.start() - 40) : figure.end() + 20].split())
                errors.append(f"the ledger lacks {figure[0]} of {around!r}")
        for (start, end), value in sorted(values.items(), reverse=True):
            text = text[:start] + value + text[end:]
        return text, errors


@functools.cache
def pattern(fragment: str) -> re.Pattern:
    """A fragment with any number in place of each ``{}``, however its words are broken into lines."""
    parts = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in fragment.split("{}"))
    return re.compile(f"({NUMBER})".join(parts))


def printed(value: float, as_in: str) -> str:
    """A value with the sign and the decimals of another figure."""
    sign, decimals = "+" if as_in[0] in f"+{MINUS}" else "", len(as_in.partition(".")[2])
    return f"{value:{sign},.{decimals}f}".replace("-", MINUS)
