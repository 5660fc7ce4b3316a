"""What has become of the arguments of a job so far, while its settings are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.jobs.job import Argument, Job, Setting, ordered
from spbench.bench.jobs.job_files import JobFiles


@dataclass(kw_only=True)
class Account:
    """Settings so far, and what was made of the arguments, by their names.

    Attributes:
        made_of: what was made of each.
        idle: arguments that could have had an effect, and why they have none here.
        missing: arguments that are refused here, and what is missing.
        problems, remarks: as of :class:`Job`.
    """

    settings: list[Setting] = field(default_factory=list)
    made_of: dict[str, list[str]] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def ignore(self, reason: str, *names: str) -> None:
        """Say why arguments have no effect here."""
        for name in names:
            self.idle.setdefault(name, reason)

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
        return Job(
            kind=kind,
            program=program,
            title=files.title,
            arguments=[*arguments],
            settings=ordered(self.settings),
            problems=[*self.problems, *problems],
            remarks=self.remarks,
        )
