"""The style of printed figures: widths, fonts and legend; and saving figures as files."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from spbench.plots.style import INK, shortened

#: the width of a page's text, and of one of its two columns
PAGE_INCHES, COLUMN_INCHES = 7.0, 3.3
DPI = 200
#: the file types; metadata that would differ from run to run are set to None
_FORMS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_LEGEND_LINE_INCHES = 0.15

#: matplotlib's settings: white panels with a grid, as in seaborn's style "whitegrid"
_RC: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": ".8",
    "axes.axisbelow": True,
    "axes.grid": True,
    "xtick.bottom": False,
    "ytick.left": False,
    "patch.edgecolor": "w",
    "lines.solid_capstyle": "round",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures are alike everywhere
    "font.size": 7.5,
    "text.color": INK,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "hatch.linewidth": 0.5,
    "patch.force_edgecolor": False,
    "svg.hashsalt": "spbench",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # fonts that can be edited, as publishers ask for
}


@contextmanager
def house_style() -> Iterator[None]:
    """A context with the settings of matplotlib under which figures are drawn and saved."""
    with mpl.rc_context(_RC):
        yield


def new_figure(width_inches: float, height_inches: float, title: str) -> Figure:
    """An empty figure with constrained layout and no display; its title is added to ``height_inches``."""
    lines = shortened(title, int(13.5 * width_inches), 3)
    height_inches += 0.1 + 0.16 * (1 + lines.count("\n"))
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    figure.suptitle(lines)
    return figure


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Put one legend below all panels, in place of an earlier legend, and make the figure higher for it. Of
    several handles with one label, the first is shown."""
    entries: dict[str, Artist] = {}
    for handle in handles:
        entries.setdefault(str(handle.get_label()), handle)
    for earlier in list(figure.legends):
        rows = int(earlier.get_gid() or 0)
        figure.set_figheight(figure.get_figheight() - _LEGEND_LINE_INCHES * rows - 0.08)
        earlier.remove()
    if not entries:
        return
    fitting = int(figure.get_figwidth() / (0.052 * max(map(len, entries)) + 0.55))
    columns = max(1, min(fitting, len(entries)))
    rows = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE_INCHES * rows + 0.08)
    legend = figure.legend(
        handles=list(entries.values()), loc="outside lower center", ncols=columns, handlelength=3.2
    )
    legend.set_gid(str(rows))


def form_of(path: Path) -> str:
    """The file type of a path, by its ending: "png", "svg" or "pdf".

    Raises:
        ValueError: the path has another ending.
    """
    form = path.suffix.removeprefix(".")
    if form not in _FORMS:
        raise ValueError(f"{path}: a figure is written as {', '.join(f'.{name}' for name in _FORMS)}")
    return form


def save_as(figure: Figure, path: Path) -> Path:
    """Write a figure as one file, whose type is the ending of ``path``; returns the path.

    Raises:
        ValueError: the path has another ending than .png, .svg or .pdf.
        OSError: the file cannot be written, for example on a full disk; no part of it is left.
    """
    form, content = form_of(path), io.BytesIO()
    with house_style():
        figure.savefig(content, format=form, metadata=_FORMS[form])
    if form == "png":
        # 256 colours need a third of the bytes, and the eye does not see the difference
        with Image.open(content) as image:
            few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        content = io.BytesIO()
        few.save(content, "png", optimize=True, dpi=(DPI, DPI))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        if error.filename is None and path.is_file():  # the file was opened, and then the disk was full
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png, NAME.svg and NAME.pdf into a folder, which is made if need be; returns the paths of the
    files. The same figure gives the same bytes."""
    return [save_as(figure, folder / f"{name}.{form}") for form in _FORMS]
