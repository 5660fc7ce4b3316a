"""Questions to git: the commit of a folder, the time of a commit; and checkouts of commits in new folders."""

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.files import resolved

#: the number of hexadecimal digits of a commit's hash in texts
SHORT_HASH = 12

#: the end of a commit's name if tracked files differ from the commit
DIRTY = "-dirty"

_LIMIT_S = 60


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command that is run in a folder, without white space at the ends.

    Raises:
        UserError: git is not installed, takes too long, or fails; the message has git's error.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_LIMIT_S
        )
    except FileNotFoundError as error:
        raise UserError("git is not installed, or not in PATH; it is needed for commits") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run git in {folder}: {error}") from error
    if done.returncode != 0:
        raise UserError(f"git {arguments[0]} fails in {folder}: {done.stderr}")
    return done.stdout.strip()


def asked(folder: Path, *arguments: str) -> str:
    """The output of a git command in a folder; "" if git fails or is not installed."""
    try:
        return git(folder, *arguments)
    except UserError:
        return ""


def own_checkout() -> Path | None:
    """The root of the checkout that this code is run from; None: spbench is installed without one."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / ".git").exists() else None


def checkout_around(folder: Path) -> Path | None:
    """The root of the git checkout in which a folder lies; None if the folder lies in no checkout."""
    root = asked(folder, "rev-parse", "--show-toplevel")
    return Path(root) if root else None


def commit_of_files(checkout: Path, ignored: Sequence[str] = ()) -> str | None:
    """The commit of a checkout, with :data:`SHORT_HASH` digits, and :data:`DIRTY` at the end if tracked files
    are changed; None if there is no commit.

    Args:
        ignored: patterns of files whose changes do not count.
    """
    commit = asked(checkout, "describe", "--always", f"--abbrev={SHORT_HASH}", "--exclude=*")
    excluded = [f":(exclude){pattern}" for pattern in ignored]
    changed = asked(checkout, "status", "--porcelain", "--untracked-files=no", "--", ".", *excluded)
    return (f"{commit}{DIRTY}" if changed else commit) or None


@cache
def full_commit(commit: str, near: Path) -> str:
    """The full hash of a commit, if the checkout around ``near`` or around the working folder has it; else
    ``commit`` itself."""
    return _near(near, "rev-parse", "--verify", "-q", "--end-of-options", f"{commit}^{{commit}}") or commit


@cache
def commit_time_s(commit: str, near: Path) -> int | None:
    """The time of a commit, in seconds since 1970; None if neither the checkout around ``near`` nor that
    around the working folder has the commit."""
    seconds = _near(near, "show", "-s", "--format=%ct", "--end-of-options", commit)
    return int(seconds) if seconds.isdecimal() else None


@cache
def day_of(commit: str) -> str:
    """The day of a commit, such as "2026-11-20"; "" if neither spbench's checkout nor that around the working
    folder has the commit."""
    name = f"{commit.removesuffix(DIRTY)}^{{commit}}"
    places = dict.fromkeys([own_checkout() or Path(), Path()])
    days = (asked(place, "show", "--no-patch", "--format=%cs", "--end-of-options", name) for place in places)
    return next(filter(None, days), "")


def _near(path: Path, *arguments: str) -> str:
    folder = path if path.is_dir() else path.parent
    return asked(folder, *arguments) or asked(Path(), *arguments)


@cache
def last_change(path: Path) -> str:
    """The full hash of the commit that changed a file or a folder last; "" if git does not know the path."""
    place = resolved(path)
    return asked(place.parent, "log", "-1", "--format=%H", "--", place.name)


@dataclass(frozen=True)
class CodeVersion:
    """A version of a repository's files, in a folder.

    Attributes:
        root: the folder.
        commit: the full hash of the commit.
        changed: whether tracked files differ from those of the commit.
    """

    root: Path
    commit: str
    changed: bool = False

    def __str__(self) -> str:
        short = self.commit[:SHORT_HASH]
        return f"{short} with changes that are not committed" if self.changed else short


def working_tree(repository: Path) -> CodeVersion:
    """The version of the files as they are in the repository's folder now, with uncommitted changes."""
    changed = git(repository, "status", "--porcelain", "--untracked-files=no")
    return CodeVersion(repository, commit_of_ref(repository, "HEAD"), bool(changed))


def commit_of_ref(repository: Path, ref: str) -> str:
    """The full hash of the commit that ``ref`` (a branch, tag or hash) names.

    Raises:
        UserError: the repository has no such commit.
    """
    git(repository, "--version")  # raises a clear error if git is missing
    name = f"{ref}^{{commit}}"
    if commit := asked(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", name):
        return commit
    raise UserError(
        f"{ref!r} names no commit of {repository}; see git branch -a, or fetch it with git fetch origin"
    )


@contextmanager
def checked_out(repository: Path, ref: str) -> Iterator[CodeVersion]:
    """A context with the commit of ``ref`` in a temporary worktree, which is always removed at the end.

    Raises:
        UserError: ``ref`` names no commit, or the commit cannot be checked out.
    """
    commit = commit_of_ref(repository, ref)
    with tempfile.TemporaryDirectory(prefix="spbench-checkout-", ignore_cleanup_errors=True) as folder:
        root = Path(folder, "code")
        try:
            git(repository, "worktree", "add", "--detach", "--quiet", str(root), commit)
            yield CodeVersion(root, commit)
        finally:
            asked(repository, "worktree", "remove", "--force", str(root))
