"""Hooks of MkDocs (mkdocs.yml names this file) that make one site of the repository's Markdown.

The site has docs/, the pages at the top (README.md is the start page) and the pages under results/. It also
has every file to which a page links, so that readers need no repository: code, YAML files and folders as
pages, other files unchanged. The report is in the folder report, if the extra `report` is installed; the
navigation links to the report, and the report's pages link back. Sphinx roles in docstrings
(``:class:`Cell```) become links to the page of the API.
"""

import posixpath
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Link, Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: the folder of the report on the site
REPORT = "report"
#: the target of a relative link or image in Markdown, without its anchor
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
#: a reference of Sphinx to a Python object, in rendered HTML
ROLE = re.compile(r":(?:class|func|mod|meth|attr):<code>([\w.]+)</code>")
#: the highlighter's name for files that are shown as pages
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh", ".sbatch": "sh"}

START_PAGE = {"README.md": "index.md"}


def page_uri(path: str) -> str:
    """The site's path of a file or folder of the repository; of Markdown if the site shows it as a page."""
    if path in START_PAGE:
        return START_PAGE[path]
    if (ROOT / path).is_dir():
        return f"{path}/folder.md"
    if Path(path).suffix in LANGUAGES:
        return f"{path}.md"
    return path.removeprefix("docs/")


def repository_path(uri: str) -> str:
    """The repository's path of a Markdown page of the site, the inverse of :func:`page_uri`."""
    for path, start in START_PAGE.items():
        if uri == start:
            return path
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def linked(path: str, markdown: str) -> Iterator[tuple[str, str]]:
    """Pairs of a relative link in a page at ``path`` and the path of the file or folder that it leads to."""
    for link in LINK.findall(markdown):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if (ROOT / target).exists():
            yield link, target


def shown(path: str) -> str | None:
    """The Markdown that shows a code file or lists a folder; None for a file that the site does not show."""
    source = ROOT / path
    hidden = "---\nsearch: {exclude: true}\n---\n"
    if source.is_dir():
        names = [
            f"{entry.name}/" if entry.is_dir() else entry.name
            for entry in sorted(source.iterdir())
            if not entry.name.startswith(("_", "."))
        ]
        listed = [f"- [{n}]({n.rstrip('/')})" if Path(n).suffix in LANGUAGES else f"- {n}" for n in names]
        return f"{hidden}# {path}\n\n" + "\n".join(listed) + "\n"
    if source.suffix in LANGUAGES:
        text = source.read_text(encoding="utf-8")
        return f"{hidden}# {path}\n\n`````{LANGUAGES[source.suffix]}\n{text}\n`````\n"
    return None


def _has_report() -> bool:
    return find_spec("itables") is not None and find_spec("markdown_it") is not None


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Add a link to the report after the start page."""
    if _has_report():
        nav.items.insert(1, Link("Results", f"{REPORT}/index.html"))
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write the report into the folder ``REPORT`` of the site."""
    if _has_report():
        from spbench.bench.tools.report.build import build
        from spbench.bench.tools.report.gathered import gather

        build(gather(ROOT / "results", None), Path(config.site_dir) / REPORT, documentation="../index.html")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and all files and folders to which pages link."""
    outside = [*ROOT.glob("*.md"), *ROOT.glob("results/reproduction/*.md")]
    pages = [path.relative_to(ROOT).as_posix() for path in sorted(outside)]
    todo = pages + [repository_path(file.src_uri) for file in files if file.src_uri.endswith(".md")]
    done: set[str] = set()
    while todo:
        path = todo.pop()
        if path in done:
            continue
        done.add(path)
        markdown = shown(path)
        if markdown is None and path.endswith(".md"):
            markdown = (ROOT / path).read_text(encoding="utf-8")
        if files.get_file_from_path(uri := page_uri(path)) is None:
            source = {"content": markdown} if markdown else {"abs_src_path": str(ROOT / path)}
            level = InclusionLevel.UNDEFINED if path in pages else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, inclusion=level, **source))
        if markdown and Path(path).suffix not in LANGUAGES:
            base = f"{path}/folder.md" if (ROOT / path).is_dir() else path
            todo += [target for _, target in linked(base, markdown)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The Markdown of a page, whose links lead to the site's paths instead of the repository's."""
    uri = page.file.src_uri
    path = repository_path(uri)
    if Path(uri.removesuffix(".md")).suffix in LANGUAGES:
        return markdown
    targets = dict(linked(path, markdown))

    def moved(link: re.Match[str]) -> str:
        target = targets.get(link[1])
        return posixpath.relpath(page_uri(target), posixpath.dirname(uri)) if target else link[1]

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The HTML of a page, with code for Sphinx roles, which is a link if the API's page has the name."""
    from spbench import __all__ as public

    def reference(role: re.Match[str]) -> str:
        name = role[1].rpartition(".")[2]
        code = f"<code>{role[1]}</code>"
        return f'<a href="#spbench.{name}">{code}</a>' if name in public else code

    return ROLE.sub(reference, html)
