"""What becomes of the arguments of a Megatron-LM job while they are translated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.job import Argument
from spbench.bench.tools.jobs.megatron_arguments import Given, GivenArguments, close_to

DEFAULT = "default of Megatron-LM"


@dataclass
class Translation(Account):
    """The arguments of a Megatron-LM job, and the settings that were made of them.

    Attributes:
        given: the arguments.
        environment: variables that are set when the job runs.
    """

    given: GivenArguments
    environment: Mapping[str, str]

    def set(self, path: str, value: Any, *names: str, note: str = "") -> None:
        """Set what comes from arguments, or variables, of these names; from their defaults where none is
        given. ``note``: said of it beside."""
        there = [name for name in names if name in self.given.by_name or name in self.environment]
        source = ", ".join(self.spelled(name) for name in there) or ("" if note and not names else DEFAULT)
        self.add(path, value, source, note)
        self.took(f"{path}: {_shown(value)}", *there)

    def spelled(self, name: str) -> str:
        """An argument or a variable as the job has it."""
        if name in self.given.by_name:
            given = self.given.by_name[name]
            return f"{given.name} {given.text}".strip()
        return f"{name}={self.environment[name]}"

    def refuse(self, missing: str, *names: str) -> None:
        """Say what is missing for arguments."""
        for name in names:
            self.missing.setdefault(name, missing)

    def arguments(self, model: str) -> Iterator[Argument]:
        """What became of every argument; those that nothing was made of have no option in ``model``."""
        for name, given in self.given.by_name.items():
            yield self._argument(name, given, model)

    def _argument(self, name: str, given: Given, model: str) -> Argument:
        known = given.known
        if known is None:
            return Argument(given.name, given.text, "unknown", close_to(given.name))
        if known.outcome == "no effect":
            return Argument(given.name, given.text, "no effect", known.detail)
        if name in self.missing:
            return Argument(given.name, given.text, "refused", self.missing[name])
        if name in self.made_of:
            return Argument(given.name, given.text, "mapped", "; ".join(self.made_of[name]))
        if name in self.idle:
            return Argument(given.name, given.text, "no effect", self.idle[name])
        if given.is_default:
            return Argument(given.name, given.text, "no effect", "is so by default")
        if name in self.unmodelled or known.outcome == "not modelled":
            return Argument(given.name, given.text, "not modelled", self.unmodelled.get(name, known.detail))
        if known.beside and not any(main in self.given.by_name for main in known.beside):
            return Argument(given.name, given.text, "no effect", f"of {known.detail}, which the job has not")
        if known.outcome == "refused":
            return Argument(given.name, given.text, "refused", f"{known.detail}: not modelled")
        if self.given.problems:
            return Argument(given.name, given.text, "mapped", "not before the arguments are right")
        return Argument(given.name, given.text, "refused", f"{model} has no option for it")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
