"""Sites that tests look at: of the committed results, and of a small part of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from spbench.bench.tools.report import gathered as gathering
from spbench.bench.tools.report.build import Site, build
from spbench.bench.tools.report.gathered import Gathered, gather
from tests.tools.packaged import scenarios_of_papers
from tests.tools.report.chromium import DESKTOP, Visit, chromium, visit

ROOT = Path(__file__).parents[3]


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
