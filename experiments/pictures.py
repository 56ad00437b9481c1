"""How experiments draw their pictures: from a file of records, as PNGs of 128 colours, a third of matplotlib's size."""

import io
import json
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from experiments.records import script_parser


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi)
    Image.open(buffer).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_records(description: str, draw: Callable[[list[dict], Path], None], name: str) -> None:
    """The main function of a script that draws the records of a file, as ``name`` next to it."""
    parser = script_parser(description)
    parser.add_argument("results", type=Path, help="JSON file of records")
    path = parser.parse_args().results
    draw(json.loads(path.read_text()), path.with_name(name))
