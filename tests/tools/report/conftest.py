"""Sites that tests look at: of the committed results, and of a small part of them; and the system's Chromium,
driven by Playwright, which sees what a page asks for and what it complains of."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Page as Tab

from spbench.bench.tools.report import gathered as gathering
from spbench.bench.tools.report.build import Site, build
from spbench.bench.tools.report.gathered import Gathered, gather
from tests.tools.packaged import scenarios_of_papers

ROOT = Path(__file__).parents[3]

DESKTOP = {"width": 1280, "height": 900}
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: milliseconds until a page must have drawn its tables, on a machine that does other work too
DRAWN_MS = 120_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser on PATH: {', '.join(NAMES)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that was opened.

    Attributes:
        complaints: errors and warnings of the console, and errors that nothing caught.
        requests: addresses that the page asked for which are no file.
    """

    tab: Tab
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path, state: str = "") -> None:
        """Go to a page of the site, and wait until its tables are drawn."""
        self.tab.goto(path.resolve().as_uri() + (f"#{state}" if state else ""))
        self.ready()

    def ready(self) -> None:
        """Wait until the table of cells is drawn, if there is one."""
        self.tab.wait_for_function(
            "!document.querySelector('#cells') || document.documentElement.dataset.cells", timeout=DRAWN_MS
        )


@contextmanager
def visit(browser: Browser, **settings: Any) -> Iterator[Visit]:
    """A new tab; ``settings`` as for Playwright's ``new_context``, such as viewport and color_scheme."""
    context = browser.new_context(**settings)
    found = Visit(context.new_page())
    found.tab.set_default_timeout(DRAWN_MS)
    found.tab.on("console", lambda m: m.type in ("error", "warning") and found.complaints.append(m.text))
    found.tab.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.tab.on(
        "request",
        lambda asked: asked.url.startswith(("file:", "data:", "blob:")) or found.requests.append(asked.url),
    )
    try:
        yield found
    finally:
        context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with chromium() as found:
        yield found


@pytest.fixture
def tab(browser: Browser) -> Iterator[Visit]:
    """A desktop's window in the light scheme."""
    with visit(browser, viewport=DESKTOP, color_scheme="light") as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def scenarios_loaded_once() -> Iterator[None]:
    """The packaged scenarios are read once, which takes seconds."""
    papers = scenarios_of_papers()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gathering, "scenarios_of", lambda name: papers)
        yield


@pytest.fixture(scope="session")
def committed_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results that a clone has: no runs."""
    folder = tmp_path_factory.mktemp("committed") / "results"
    folder.mkdir()
    for name in ("baseline", "reproduction", "verification"):
        (folder / name).symlink_to(ROOT / "results" / name)
    return folder


@pytest.fixture(scope="session")
def gathered(committed_results: Path) -> Gathered:
    """What is gathered from the committed results."""
    return gather(committed_results, None)


@pytest.fixture(scope="session")
def site(gathered: Gathered, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site of the committed results."""
    return build(gathered, tmp_path_factory.mktemp("site") / "report")


@pytest.fixture(scope="session")
def small_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One table of one paper: RSA's Table 4."""
    folder = tmp_path_factory.mktemp("small") / "results"
    table = folder / "baseline" / "rsa_table4"
    shutil.copytree(ROOT / "results" / "baseline" / "rsa_table4", table)
    reproduction = folder / "reproduction"
    reproduction.mkdir()
    for name in ("rsa.csv", "rsa_runs.csv"):
        lines = (ROOT / "results" / "reproduction" / name).read_text().splitlines()
        kept = [lines[0], *(line for line in lines[1:] if "rsa_table4" in line)]
        (reproduction / name).write_text("\n".join(kept) + "\n")
    return folder
