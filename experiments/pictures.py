"""How experiments write their pictures: PNGs of 128 colours, a third of matplotlib's size."""

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi)
    Image.open(buffer).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
