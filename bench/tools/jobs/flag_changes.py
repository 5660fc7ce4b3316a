"""The changes of a training program's arguments that turn a job into another job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spbench.bench.cell import Cell
from spbench.bench.tools.jobs import FLAGS
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.bridge import key_of
from spbench.bench.tools.jobs.flags import Flag, program_flags
from spbench.bench.tools.jobs.megatron_inside import as_key


@dataclass(frozen=True)
class FlagChanges:
    """The changes of arguments that turn a job into another job.

    Attributes:
        program: the program's name, with the version whose arguments these are.
        given: arguments to add, or with a new value: ``--recompute-granularity full``.
        left_out: arguments to take away: ``--sequence-parallel``.
        remarks: approximations that the new cell has and the old cell has not, one line each.
        missing: settings for which the program has no argument, so that it cannot make the change; else ().
    """

    program: str
    given: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The changes in one line: ``--recompute-granularity full, without --sequence-parallel``; "" if the
        program cannot make them."""
        if self.missing:
            return ""
        without = f"without {' '.join(self.left_out)}" if self.left_out else ""
        return ", ".join(filter(None, [" ".join(self.given), without]))


def flag_changes(before: Cell, after: Cell, kind: str) -> FlagChanges | None:
    """The arguments of a program that differ between two cells, each proved by reading the flags as a job.

    Args:
        kind: the kind of job (:attr:`Job.kind`).

    Returns:
        The changes; None if spbench writes no flags for this kind of job.

    Raises:
        UserError: a cell searches for its batch or length.
    """
    if kind in _BY_KEYS:
        changes = flag_changes(before, after, "megatron")
        return changes and _as_keys(changes, *_BY_KEYS[kind])
    if kind not in FLAGS:
        return None
    old, new = program_flags(kind, before), program_flags(kind, after)
    missing = _new([*old.missing, *old.beside], [*new.missing, *new.beside])
    if missing or not old.lines or not new.lines:
        return FlagChanges(new.program, missing=missing or new.missing)
    values = {line.argument: line.value for line in old.lines}
    kept = {line.argument for line in new.lines}
    return FlagChanges(
        new.program,
        tuple(_spelled(line) for line in new.lines if values.get(line.argument) != line.value),
        tuple(line.argument for line in old.lines if line.argument not in kept),
        _new(old.remarks, new.remarks),
    )


def _key_of_primus(argument: str) -> tuple[str | None, bool]:
    """The key in Primus's overrides for an argument of Megatron-LM, which is true in a job with the argument;
    None for a switch that turns something off."""
    name = as_key(argument)
    return None if name.startswith(("no_", "disable_")) else name, True


#: by kind of job that sets Megatron-LM's arguments by keys: the program, and its function like :func:`key_of`
_BY_KEYS = {"bridge": ("Megatron-Bridge", key_of), "primus": ("Primus", _key_of_primus)}


def _as_keys(
    changes: FlagChanges, program: str, key_of: Callable[[str], tuple[str | None, bool]]
) -> FlagChanges:
    """The changes of a program's keys that make the same changes of arguments of Megatron-LM."""
    if changes.missing:
        return changes
    keys, missing = list[str](), list[str]()
    for argument in (*changes.given, *changes.left_out):
        name, _, value = argument.partition(" ")
        (key, plain), given = key_of(name), argument in changes.given
        if key is None:
            missing.append(f"{name} among the keys of {program}")
        elif not argument_table("megatron").arguments[name].takes:
            keys.append(f"{key}={str(given == plain).lower()}")
        else:
            keys.append(f"{key}={value if given else 'null'}")
    proposed = () if missing else tuple(keys)
    return FlagChanges(program, proposed, remarks=changes.remarks, missing=tuple(missing))


def _new(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    return tuple(line for line in new if line not in old)


def _spelled(line: Flag) -> str:
    """An argument as a user writes it: options with a space, variables and keys with an equals sign."""
    between = " " if line.argument.startswith("--") else "="
    return f"{line.argument}{between}{line.value}" if line.value else line.argument
