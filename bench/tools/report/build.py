"""The site as a folder of files: all files are rendered, and the new folder then replaces an earlier site."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files as package_files
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.files import resolved
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import navigation
from spbench.impls import FunctionModules

PAGES = FunctionModules("spbench.bench.tools.report.pages", "*_page", "pages", "pages")
STATIC = Path(__file__).with_name("static")
#: a file of every site; a folder with this file is taken for an earlier site
MARKER = "spbench-report.json"


@dataclass(frozen=True)
class Site:
    """A written site.

    Attributes:
        files: the size of each file in bytes, by path below the folder, in alphabetical order.
    """

    folder: Path
    files: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def check_place(folder: Path) -> None:
    """Refuse a path where no site can be written.

    Raises:
        UserError: the path is a file, or a folder with files that are no site.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise UserError(
            f"--output {folder} has files in it that are no report (there is no {MARKER}); "
            "name an empty or a new folder"
        )


def build(gathered: Gathered, folder: Path, documentation: str = "") -> Site:
    """Write the site into a folder; an earlier site stays as it is until the new site is whole.

    Args:
        documentation: the address of the documentation, relative to a page; empty: pages do not link to it.

    Raises:
        UserError: the folder has files that are no site, or cannot be written.
    """
    check_place(folder)
    target = resolved(folder)
    contents = dict(sorted(files(gathered, documentation).items()))
    sizes = {path: len(content) for path, content in contents.items()}
    contents[MARKER] = (json.dumps({"files": sizes}, indent=1) + "\n").encode()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        for path, content in contents.items():
            (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / path).write_bytes(content)
        _swap(unfinished, target)
    except OSError as error:
        raise UserError(f"cannot write the report to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Site(folder, sizes | {MARKER: len(contents[MARKER])})


def _swap(new: Path, target: Path) -> None:
    """Replace the folder ``target`` by the folder ``new``; the old content is deleted."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def files(gathered: Gathered, documentation: str = "") -> dict[str, bytes]:
    """The content of every file of the site, by path.

    Raises:
        ValueError: two pages write the same file with different contents.
    """
    pages = [page for name in PAGES.names() for page in PAGES.load(name)(gathered)]
    links = navigation(pages)
    contents = dict(vendored())
    for page in pages:
        rendered = page.rendered(links, documentation)
        of_page = {path: text.encode() if isinstance(text, str) else text for path, text in rendered.items()}
        # two pages may show one figure
        if twice := [path for path in contents.keys() & of_page if contents[path] != of_page[path]]:
            raise ValueError(f"two pages write {', '.join(sorted(twice))}")
        contents |= of_page
    return contents


def vendored() -> Iterator[tuple[str, bytes]]:
    """The paths and contents of styles and scripts; itables' bundle, which sorts tables, is turned from a
    module into a plain script."""
    for path in sorted(STATIC.iterdir()):
        yield f"assets/{path.name}", path.read_bytes()
    bundle = package_files("itables") / "html"
    script = (bundle / "dt_bundle.js").read_text(encoding="utf-8")
    # pages opened from files cannot import modules, so the module's export becomes a name of the window
    script, count = re.subn(r"export\s*\{[^}]*?(\w+) as default[^}]*\};?", r"window.DataTable=\1;", script)
    if count != 1:
        raise RuntimeError(f"itables {version('itables')}: its bundle exports {count} defaults, not one")
    yield "assets/tables.js", f"(function(){{{script}\n}})();\n".encode()
    yield "assets/tables.css", (bundle / "dt_bundle.css").read_bytes()
