"""What `spbench reproduce` was asked for, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spbench.bench.errors import UserError
from spbench.bench.git import asked as asked_git

if TYPE_CHECKING:
    from spbench.bench.measure.scenarios.scenario import Scenario

FOLDER = Path("results", "reproduction")
#: where they go without --write where git follows :data:`FOLDER`
UNFOLLOWED = Path("results", "runs", "reproduction")


@dataclass(frozen=True)
class Reproduction:
    """What `spbench reproduce` was asked for.

    Attributes:
        paper: its name, or PAPER/SCENARIO: of that scenario alone cells are run, and what the files have of
            the others stays.
        executor: the address of one that runs cells on other machines; None: all run here.
        output: folder of the CSV files and figures.
        write: write the generated parts of REPRODUCE.md and of the paper's details anew.
    """

    paper: str
    all_variants: bool
    jobs: int | None
    executor: str | None
    output: Path
    fresh: bool
    write: bool

    @property
    def asked(self) -> tuple[str, str]:
        """The name of the paper, and of the one scenario, or ""."""
        paper, _, scenario = self.paper.partition("/")
        return paper, scenario

    def check(self) -> None:
        """Refuse a scenario without a name, and one of all papers.

        Raises:
            UserError: says what to write.
        """
        paper, slash, scenario = self.paper.partition("/")
        if slash and not scenario:
            raise UserError(
                f"{self.paper!r} names no scenario; write {paper} for all of its scenarios, or one of them"
            )
        if slash and paper == "all":
            raise UserError(f"{self.paper!r}: a scenario answers to one paper; write PAPER/{scenario}")

    def runs(self, scenario: Scenario) -> Path:
        """Where a scenario's cells are kept: with those of `spbench run`, or below another output."""
        above = Path("results") if self.output in (FOLDER, UNFOLLOWED) else self.output
        return above / "runs" / scenario.name

    def earlier(self, file: str) -> Path:
        """The file of this name that an earlier reproduction has left: in the output, else, where that is
        not committed, the committed one."""
        path = self.output / file
        return FOLDER / file if self.output == UNFOLLOWED and not path.exists() else path


def default_output(write: bool) -> Path:
    return UNFOLLOWED if not write and asked_git(Path(), "ls-files", "--", str(FOLDER)) else FOLDER
