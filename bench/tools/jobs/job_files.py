"""The files of a job, and reading them by the kind that knows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import decoded, read_file
from spbench.bench.tools.jobs import JOBS
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.other_programs import keyed_program, started_program

#: bytes of a file that is read: job files are written by hand
MOST_BYTES = 2**20


@dataclass(frozen=True)
class JobFile:
    """A file of a job, and its content.

    Attributes:
        part: the name of one of several configurations that a file has; "": it has one.
    """

    path: Path
    content: bytes
    part: str = ""

    @property
    def text(self) -> str:
        """The content; UserError where it is not UTF-8."""
        return decoded(self.path, self.content)

    def __str__(self) -> str:
        """Its name, as messages and titles have it."""
        return ":".join(filter(None, [self.path.name, self.part]))

    def wrong(self, problem: str) -> UserError:
        """The error that says what is wrong with the file."""
        return UserError(f"{self.path}: {problem}")


class OneFileRead(UserError):
    """Several files are given to a kind of job that is one file."""


@dataclass(frozen=True)
class JobFiles:
    """What an importer is given.

    Attributes:
        gpus: how many the job runs on; None: what the files say.
        cluster: that the job runs on; None: not known.
        environment: variables that are set beside those of the files.
    """

    files: Sequence[JobFile]
    gpus: int | None = None
    cluster: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The files' names."""
        return " ".join(str(file) for file in self.files)

    def the_file(self) -> JobFile:
        """The only file; :class:`OneFileRead` if there are several."""
        if len(self.files) != 1:
            raise OneFileRead(f"{self.title}: one file is read, but {len(self.files)} are given")
        return self.files[0]

    def machine_problems(self, gpus: int | None) -> list[str]:
        """What is not said about the machine, one a line; ``gpus`` are those of the files."""
        problems = []
        if self.gpus is None and gpus is None:
            problems.append("how many GPUs the job runs on is not said; --gpus N")
        if self.cluster is None:
            problems.append("which cluster it runs on is not said; --cluster NAME (`spbench list clusters`)")
        return problems


def read_job(
    kind: str | None,
    files: Sequence[Path | str | JobFile],
    *,
    gpus: int | None = None,
    cluster: str | None = None,
    environment: Mapping[str, str] | None = None,
    allow_unknown: bool = False,
) -> Job:
    """The job that the files are.

    Args:
        kind: a name of :data:`JOBS`; None: the only kind that takes the files for its own.
        files: their paths; ``FILE.py:NAME`` is one of several configurations in a file.
        gpus: how many it runs on; None: what the files say.
        environment: variables that are set beside those of the files.

    Returns:
        The job, also where arguments are refused, unknown or not enough: see :meth:`Job.refusal`.

    Raises:
        UserError: a file cannot be read or is damaged; there is no such kind; the files are of no kind, of
            several, or of another.
    """
    if kind is not None and kind not in JOBS:
        raise UserError(f"unknown kind of job {kind!r}{suggestion(kind, JOBS.names())}")
    if not files:
        raise UserError("no file of a job is given")
    given = JobFiles([_read(file) for file in files], gpus, cluster, environment or {})
    for file in given.files:
        if other := keyed_program(file) or started_program(file, unread=False):
            raise file.wrong(other)
    found = _jobs(given, JOBS.names() if kind is None else [kind], kind)
    if not found and kind is None:
        for file in given.files:
            if other := started_program(file, unread=True):
                raise file.wrong(other)
    if len(found) != 1:
        known = f"known kinds: {', '.join(JOBS.names())}"
        what = f"a job of {' and of '.join(found)}: say which" if found else f"no job of {kind or 'any kind'}"
        raise UserError(f"{given.title}: {what} ({known})")
    return dataclasses.replace(next(iter(found.values())), allow_unknown=allow_unknown)


def _jobs(given: JobFiles, kinds: Sequence[str], asked: str | None) -> dict[str, Job]:
    """What the files are as jobs of those kinds that take them for their own."""
    found: dict[str, Job] = {}
    for name in kinds:
        try:
            job = JOBS.load(name)(given)
        except OneFileRead:
            if asked is not None:
                raise
            continue  # so the files are of another kind
        if job is not None:
            found[name] = job
    return found


def path_and_part(word: Path | str) -> tuple[Path, str]:
    """The path of a file, and of FILE.py:NAME, unless that is a file, the name of a configuration in it."""
    path, colon, part = str(word).rpartition(":")
    if not colon or not path.endswith(".py") or Path(word).is_file():
        return Path(word), ""
    return Path(path), part


def _read(file: Path | str | JobFile) -> JobFile:
    if isinstance(file, JobFile):
        read = file
    else:
        path, part = path_and_part(file)
        read = JobFile(path, read_file(path), part)
    if not read.content.strip():
        raise read.wrong("is empty")
    if len(read.content) > MOST_BYTES:
        raise read.wrong(f"has more than {MOST_BYTES} bytes: no job file")
    return read
