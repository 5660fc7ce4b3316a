"""What has become of the arguments of a job so far, while its settings are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.tools.jobs.job import MOST_NAMED, NOT_MODELLED, Argument, Job, Setting, ordered, short
from spbench.bench.tools.jobs.job_files import JobFiles


@dataclass(kw_only=True)
class Account:
    """Settings so far, and what was made of the arguments, by their names.

    Attributes:
        made_of: what was made of each.
        idle: arguments that could have had an effect, and why they have none here.
        unmodelled: arguments that have an effect which is not modelled, and what they may move.
        missing: arguments that are refused here, and what is missing.
        problems, remarks: as of :class:`Job`.
    """

    settings: list[Setting] = field(default_factory=list)
    made_of: dict[str, list[str]] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    unmodelled: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def ignore(self, reason: str, *names: str) -> None:
        """Say why arguments have no effect here."""
        for name in names:
            self.idle.setdefault(name, reason)

    def leave(self, what: str, because: str, *names: str) -> None:
        """Say that arguments may move "time", "memory" or both, which is not modelled."""
        for name in names:
            self.unmodelled.setdefault(name, may_move(what, because))

    def took(self, detail: str, *names: str) -> None:
        """Say what was made of arguments."""
        for name in names:
            self.made_of.setdefault(name, []).append(detail)

    def add(self, path: str, value: Any, source: str, note: str = "") -> None:
        """Set what comes from ``source``; ``note``: said of it beside."""
        self.settings.append(Setting(path, value, ": ".join(filter(None, [source, note]))))

    def job(
        self,
        kind: str,
        program: str,
        files: JobFiles,
        arguments: Iterable[Argument],
        problems: Sequence[str] = (),
    ) -> Job:
        """The job, on the cluster that was asked for; ``problems`` are of the files, and stand last."""
        if files.cluster is not None:
            self.add("cluster", files.cluster, "", "--cluster")
        told = [*arguments]
        return Job(
            kind=kind,
            program=program,
            title=files.title,
            arguments=told,
            settings=ordered(self.settings),
            problems=[*self.problems, *problems],
            remarks=[*self.remarks, *_unmodelled(told)],
        )


def may_move(what: str, because: str) -> str:
    """What is said of an argument that is not modelled."""
    return f"may move {what}: {because}"


def _unmodelled(arguments: Iterable[Argument]) -> Iterator[str]:
    """A remark on the arguments that may move one thing or another and are not modelled."""
    by_what: dict[str, list[str]] = {}
    for each in arguments:
        if each.outcome == NOT_MODELLED:
            by_what.setdefault(each.detail.partition(":")[0], []).append(short(str(each)))
    for what, names in by_what.items():
        told = ", ".join(names[:MOST_NAMED])
        told += f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        yield f"{NOT_MODELLED}, and {what}: {told} (spbench import --explain says how)"
