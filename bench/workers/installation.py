"""What a measurement depends on in a machine's installation, and whether another machine has the same."""

from __future__ import annotations

from dataclasses import dataclass

from spbench.bench.measuring_code import code_digest
from spbench.bench.provenance import installed_version
from spbench.impls import loose_files
from spbench.impls.discovery import plugin_entries


@dataclass(frozen=True)
class Installation:
    """Attributes:
    spbench, torch: their versions, as the package metadata has them.
    plugins: the entry points of plug-ins, each as GROUP:NAME, and files in no package, as file:NAME.py.
    code: :func:`code_digest`.
    """

    spbench: str
    torch: str
    plugins: frozenset[str]
    code: str

    @classmethod
    def here(cls) -> Installation:
        """That of this machine, as its files are now."""
        code_digest.cache_clear()
        return cls(
            spbench=installed_version("spbench") or "none",
            torch=installed_version("torch") or "none",
            plugins=frozenset(
                [
                    *(f"{entry.group}:{entry.name}" for entry in plugin_entries()),
                    *(f"file:{path.name}" for path in loose_files.paths()),
                ]
            ),
            code=code_digest(),
        )

    def difference(self, other: Installation) -> str:
        """How the other one differs, and the remedy, as the end of a sentence; "" if it does not.

        The digest of the code decides, not spbench's version, which an editable checkout may lack.
        """
        if lacking := self.plugins - other.plugins:
            return f"lacks the plug-ins {_listed(lacking)}; install them there and start it again"
        if unknown := other.plugins - self.plugins:
            return f"has the plug-ins {_listed(unknown)}, which are not here; install the same on both"
        if self.torch != other.torch:
            return f"has torch {other.torch}, not {self.torch}; install the same there and start it again"
        if self.code != other.code:
            return (
                f"has other code of spbench or its plug-ins (version {other.spbench}, digest {other.code}; "
                f"here {self.spbench}, {self.code}); install the same there and start it again"
            )
        return ""


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
