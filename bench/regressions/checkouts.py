"""Two versions of the code side by side: commits of the repository in folders of their own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spbench.bench.errors import UserError


@dataclass(frozen=True)
class CodeVersion:
    """A state of the code that can be run.

    Attributes:
        root: the folder in which the package is.
        commit: its full hash.
        changed: whether files differ from those of the commit.
    """

    root: Path
    commit: str
    changed: bool = False

    def __str__(self) -> str:
        short = self.commit[:12]
        return f"{short} with changes that are not committed" if self.changed else short


def own_repository() -> Path:
    """The checkout that this code is run from.

    Raises:
        UserError: it is installed, without its repository.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        raise UserError(
            f"spbench runs from {root}, which is no checkout, so there are no commits to compare; clone the "
            "repository, install it with pip install -e, and run the command from there"
        )
    return root


def working_tree(repository: Path) -> CodeVersion:
    """The code as it is in the repository's folder now."""
    changed = _git(repository, "status", "--porcelain", "--untracked-files=no")
    return CodeVersion(repository, commit_of_ref(repository, "HEAD"), bool(changed))


def commit_of_ref(repository: Path, ref: str) -> str:
    """The hash of the commit that a ref names.

    Raises:
        UserError: there is none.
    """
    try:
        return _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"{ref!r} names no commit of {repository}; see git branch -a, or fetch it with git fetch origin"
        ) from error


@contextmanager
def checked_out(repository: Path, ref: str) -> Iterator[CodeVersion]:
    """The commit of a ref in a temporary worktree, which is removed afterwards whatever happens.

    Raises:
        UserError: there is no such commit, or it cannot be checked out.
    """
    commit = commit_of_ref(repository, ref)
    with tempfile.TemporaryDirectory(prefix="spbench-checkout-", ignore_cleanup_errors=True) as folder:
        root = Path(folder, "code")
        try:
            _git(repository, "worktree", "add", "--detach", "--quiet", str(root), commit)
            yield CodeVersion(root, commit)
        except subprocess.CalledProcessError as error:
            raise UserError(f"cannot check {ref} out: {' '.join(error.stderr.split())}") from error
        finally:
            subprocess.run(
                ["git", "-C", str(repository), "worktree", "remove", "--force", str(root)],
                capture_output=True,
            )


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except FileNotFoundError as error:
        raise UserError("git is not installed, or not in PATH; it is needed to check commits out") from error
