"""Commits, as git has them in a checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.history.run_record import Commit, utc

_LIMIT_S = 30


def commit_in(repository: Path | None, made_by: str, branch: str | None) -> Commit:
    """The commit that made results.

    Args:
        repository: a checkout, whose commit it is; None: results were made by spbench's own checkout.
        made_by: the commit of spbench, as the results have it; empty for code in no checkout.
        branch: None: the one that is checked out.

    Raises:
        UserError: the commit or the branch is not known, or the repository has changed files or another
            commit than the results.
    """
    if repository is None:
        if not made_by:
            raise UserError(
                "the results do not say which commit made them; name the checkout that was measured by "
                "--repository"
            )
        repository = Path(__file__).resolve().parents[2]
        found = made_by
    else:
        found = _head(repository, made_by)
    shown = _git(repository, "show", "--no-patch", "--format=%H %cI", f"{found}^{{commit}}")
    if not shown:
        raise UserError(
            f"{repository} has no commit {found}, which made the results; fetch it, or name the checkout "
            "that was measured by --repository"
        )
    branch = branch or _git(repository, "branch", "--show-current")
    if not branch:
        raise UserError(f"{repository} is on no branch; name that of the record by --branch")
    commit_hash, date = shown.split()
    return Commit(commit_hash, utc(date), branch)


def _head(repository: Path, made_by: str) -> str:
    head = _git(repository, "rev-parse", "HEAD")
    if not head:
        raise UserError(f"{repository} is no checkout of a git repository with a commit")
    if _git(repository, "status", "--porcelain", "--untracked-files=no"):
        raise UserError(
            f"{repository} has changed files, so that nothing is recorded; commit them, and run again"
        )
    known = _git(repository, "rev-parse", "--quiet", "--verify", f"{made_by}^{{commit}}") if made_by else ""
    if known and known != head:
        raise UserError(
            f"the results were made by commit {made_by}, but {head[:12]} is checked out in {repository}; "
            "run again"
        )
    return head


def _git(repository: Path, *arguments: str) -> str:
    """What git prints; "" where it fails."""
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run git in {repository}: {error}") from error
    return done.stdout.strip() if done.returncode == 0 else ""


@cache
def last_change(path: Path) -> str:
    """The hash of the commit that changed a file or a folder last; "" where no git knows of it."""
    place = path.resolve()
    try:
        return _git(place.parent, "log", "-1", "--format=%H", "--", place.name)
    except UserError:
        return ""


@cache
def day_of(commit: str) -> str:
    """The day of a commit of spbench's checkout, as 2026-11-20; "" where no git knows of it."""
    name = commit.removesuffix("-dirty")
    try:
        return _git(
            Path(__file__).resolve().parent, "show", "--no-patch", "--format=%cs", f"{name}^{{commit}}"
        )
    except UserError:
        return ""
