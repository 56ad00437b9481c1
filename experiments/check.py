"""Checks for ``python -m experiments.tables --check``: records give each figure of a page's text, of stated commits.

* A number before x, %, ms, s, GiB or tokens/s needs a record. It is one of the page's tables, or lies in a folder of
  experiments that the paragraph, list item or row links to.
* Without one, its sentence or cell ends with ``<!-- from WHERE: WHY -->``.
* A page may have one line that ends with ``<!-- state -->``. It names the commits of all these records, and what has
  changed in ``titan_fp8moe/`` between them and HEAD. ``python -m experiments.tables`` writes it.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

Record = dict

STATE = re.compile(r"^.*<!-- state -->$", re.MULTILINE)
GENERATED = re.compile(r"```.*?```|<!-- table: .*?<!-- end -->", re.DOTALL)
BLOCKS = re.compile(r"\n\s*\n|\n(?=\s*(?:[|*#]|\d+\. ))")
PARTS = re.compile(r"(<!-- from [^>]+?: [^>]+ -->)|(?<=[.|])\s+")
FIGURE = re.compile(r"(?<![\w.,])(\d+(?:,\d{3})*(?:\.(\d+))?)(x|%| ?(?:tokens/s|GiB|ms|s))(?!\w)")
FOLDER = re.compile(r"experiments/(\w+)")


class Figure(NamedTuple):
    """A number of a text with its unit, and the folders that its paragraph links to."""

    text: str
    number: str
    decimals: int
    unit: str
    folders: frozenset[str]


def figures(text: str) -> Iterator[Figure]:
    """Yields figures without a mark, outside of code and of generated tables."""
    for block in BLOCKS.split(GENERATED.sub("", STATE.sub("", text))):
        folders = frozenset(FOLDER.findall(block))
        parts = [part for part in PARTS.split(" ".join(block.split())) if part]
        for part, after in pairwise([*parts, ""]):
            if not part.startswith("<!-- from ") and not after.startswith("<!-- from "):
                for number, decimals, unit in FIGURE.findall(part):
                    yield Figure(number + unit, number.replace(",", ""), len(decimals), unit.strip(), folders)


def values(record: Record, unit: str) -> Iterator[float]:
    """Yields a record's numbers in a unit."""
    numbers = [record.get(key) for key in ("value", "reference_value", "half_width")]
    speedup, of_loss = record.get("speedup"), record["unit"].startswith(("of ", "relative"))
    if unit == "x" and speedup:
        yield speedup
        if "reference_peak_gib" in record:
            yield record["peak_gib"] / record["reference_peak_gib"]
    elif unit == "%":
        numbers = numbers if of_loss else []
        numbers += [*record.get("spread", {}).values(), *record.get("gaps", []), *record.get("reference_gaps", [])]
        numbers += [speedup - 1] if speedup else []
        yield from (100 * abs(number) for number in numbers if isinstance(number, float | int))
    else:
        if record["unit"].startswith(unit):
            yield from (number for number in numbers if isinstance(number, float | int))
        if unit == "GiB":
            yield from (record[key] for key in ("peak_gib", "reference_peak_gib") if record.get(key))


def givers(figure: Figure, records: list[Record]) -> list[Record]:
    """The records that round to the figure."""
    return [r for r in records if any(f"{v:.{figure.decimals}f}" == figure.number for v in values(r, figure.unit))]


def commits_of(record: Record) -> set[str]:
    """The commit of a record, or those of the points that it summarizes."""
    return {point["commit"] for point in record.get("points", {}).values()} or {record["commit"]}


class Page(NamedTuple):
    """``shown``: the records of its tables; ``folders``: all records by folder of experiments."""

    text: str
    shown: list[Record]
    folders: dict[str, list[Record]]

    def found(self) -> Iterator[tuple[Figure, list[Record]]]:
        for figure in figures(self.text):
            linked = [record for name in figure.folders for record in self.folders.get(name, [])]
            yield figure, givers(figure, self.shown + linked)

    def cited(self) -> set[str]:
        """Commits of the tables' records, and the newest that gives a figure which these do not."""
        names = {name for record in self.shown for name in commits_of(record)}
        for _, records in self.found():
            if records and not any(commits_of(record) & names for record in records):
                names |= commits_of(max(records, key=lambda record: record["date"]))
        return names

    def state(self, changed: Callable[[set[str]], list[str]]) -> str:
        names = self.cited()
        commits, areas = (", ".join(f"`{name}`" for name in found) for found in (sorted(names), changed(names)))
        return f"Measured at {commits}. Since then `titan_fp8moe/` has changed in: {areas or 'nothing'}. <!-- state -->"

    def errors(self, changed: Callable[[set[str]], list[str]]) -> Iterator[str]:
        for figure, records in self.found():
            if not records:
                yield f"no record gives {figure.text}; link its experiments/FOLDER or end with <!-- from WHERE: WHY -->"
        if (line := STATE.search(self.text)) is None:  # tables name their commits themselves
            return
        commits, _, areas = line[0].partition("changed in:")
        for what, want, have in (
            ("commit", self.cited(), re.findall(r"`(\w+\+?)`", commits)),
            ("change of titan_fp8moe", {*changed(self.cited())}, re.findall(r"`([\w ]+)`", areas)),
        ):
            yield from (f"the state lacks {what} {name}" for name in sorted(want - {*have}))
            yield from (f"the state names {what} {name}, which is none" for name in sorted({*have} - want))


def changed_in(root: Path) -> Callable[[set[str]], list[str]]:
    """Folders of titan_fp8moe/ that differ between any of some commits and HEAD, and "top level"."""

    def changed(commits: set[str]) -> list[str]:
        areas = set()
        for commit in commits:
            command = ["git", "-C", str(root), "diff", "--name-only", commit.rstrip("+"), "HEAD", "--", "titan_fp8moe"]
            names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            areas |= {"top level" if len(parts := Path(name).parts) == 2 else parts[1] for name in names}
        return sorted(areas)

    return changed
