"""The command of a script that trains, the number of GPUs on which the command starts processes, and the
command's arguments as values by name, like the keys of a configuration.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.account import scalar_of
from spbench.bench.tools.jobs.argument_tables import ArgumentTable
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.shell import Command, Shell
from spbench.bench.tools.jobs.shell_syntax import ShellError, given_flag, shown_word, unknown_in

#: options of launchers for the number of processes of a node, of nodes, and of processes in all
_PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--gpus-per-node", "--ntasks-per-node")
_NODES = ("--nnodes", "--nodes", "-N", "--num-nodes", "--num_nodes")
_RANKS = ("-np", "-n", "--ntasks", "--num-processes", "--num_processes")
#: the name by which --given chooses one of several commands that train
_LINE = "line"
#: the most digits, in all, of the values of variables that count processes
_MOST_DIGITS = 11
_COMMENT_OPTION = re.compile(r"^#SBATCH\s+(-\w|--[\w-]+)(?:[ =]+(\S+))?", re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """A command that trains.

    Attributes:
        program: the name of the program's Python file.
        arguments: the words after the program; :func:`unknown_in` tells their unknown parts.
        environment: the variables that the script exports, by name.
        gpus: the number of processes that the command starts, one on each GPU; None: unknown.
        not_said: why ``gpus`` is None, such as "$NNODES is not set"; "" if there is no single reason.
        launcher: the words before the program.
    """

    line: int
    program: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    gpus: int | None
    not_said: str = ""
    launcher: Sequence[str] = ()


#: variables that every shell has; their values may be made up, because only the names of files matter
_ALWAYS = {"HOME": "~", "PWD": "."}


def shell_of(file: JobFile, environment: Mapping[str, str]) -> Shell:
    """The state of a shell after the script ``file``. UserError if the script cannot be read."""
    return _after(Shell({**_ALWAYS, **environment}, set(environment)), file, file.text)


def _after(shell: Shell, file: JobFile, text: str) -> Shell:
    """The shell after it has read the text of a script in ``file``; errors as of :func:`shell_of`."""
    try:
        shell.read(text)
    except ShellError as error:
        raise UserError(f"{file.path}:{error.line}: {error}") from error
    except RecursionError as error:
        raise file.wrong("brackets are nested too deeply") from error
    return shell


def launched(
    file: JobFile,
    programs: re.Pattern[str],
    environment: Mapping[str, str],
    kinds: Collection[str] = (),
    launcher: str = "",
) -> Launch | None:
    """The command of a shell script that runs one of the ``programs``, a pattern of file names; None if the
    script has no such command. ``--given line=N`` chooses among several commands.

    Args:
        kinds: words of which the program's first argument must be one; empty: any first argument will do.
        launcher: a regular expression of the words before the program, from the first on.

    Raises:
        UserError: the script cannot be read, has several such commands, or has the command in a branch.
    """
    try:
        shell = shell_of(file, environment)
        for command in list(shell.commands):  # sh -c "torchrun ..."
            inner = [w for flag, w in zip(command.words, command.words[1:], strict=False) if flag == "-c"]
            for script in (w for w in inner if programs.search(w) and " " in w.strip()):
                nested = _after(Shell(dict(shell.variables), set(shell.exported)), file, script)
                shell.commands.remove(command)
                shell.commands += [
                    Command(command.line, [*command.words, *each.words], each.environment, command.branch)
                    for each in nested.commands
                ]
    except UserError:
        if not programs.search(file.text):
            return None
        raise
    training = [
        (each, at)
        for each in shell.commands
        if (at := _program(each.words, programs, kinds)) is not None
        and re.match(launcher, " ".join(map(shown_word, each.words[:at])))
    ]
    if not training:
        return None
    if len(training) > 1:
        lines = " and ".join(str(command.line) for command, _ in training)
        training = [each for each in training if str(each[0].line) == environment.get(_LINE)]
        if len(training) != 1:
            how = f"leave one, or --given {_LINE}=N"
            raise UserError(f"{file.path}: several commands train, in lines {lines}; {how}")
    command, at = training[0]
    if command.branch:
        raise UserError(
            f"{file.path}:{command.line}: the command that trains is under a condition, in a loop or in a "
            "function, which are not read; write it by itself"
        )
    options = {f[1]: f[2] or "" for f in _COMMENT_OPTION.finditer(file.text)}
    exported = {**environment, **command.environment, **_of_ray(command.words[:at])}
    gpus, not_said = _gpus(command.words[:at], options, exported)
    program = PurePosixPath(shown_word(command.words[at])).name
    words = command.words
    return Launch(command.line, program, words[at + 1 :], exported, gpus, not_said, words[:at])


def _of_ray(words: Sequence[str]) -> dict[str, str]:
    """The variables that `ray job submit --runtime-env-json=JSON` sets; none if the JSON is not known."""
    texts = [word.partition("=")[2] for word in words if word.startswith("--runtime-env-json=")]
    try:
        return {name: str(value) for name, value in json.loads(texts[0])["env_vars"].items()}
    except (AttributeError, LookupError, TypeError, ValueError):  # no JSON, or of another shape
        return {}


def program_launch(files: JobFiles, spec: Mapping[str, str]) -> Launch | None:
    """The command that starts a program, in the only script among the files; None if there is none.

    Args:
        spec: the section ``launch`` of the program's table: ``program``, a regular expression of the
            program's name; ``first``, the words of which the first argument must be one; ``file``, a regular
            expression of a Python file that a script without `accelerate launch` may start instead;
            ``processes``, the variables whose values multiplied are the number of processes.

    Raises:
        UserError: the script cannot be read, or has several such commands.
    """
    script, first = files.script, spec.get("first", "").split()
    if script is None:
        return None
    launch = launched(script, re.compile(spec["program"]), files.environment, first)
    if launch is not None and first:
        launch = replace(launch, arguments=launch.arguments[1:])
    elif "file" in spec and "accelerate launch" not in script.text:
        launch = launched(script, re.compile(spec["file"]), files.environment)
    if launch is not None and "processes" in spec and not launch.program.endswith(".py"):
        counts = [launch.environment.get(name, "1") for name in spec["processes"].split()]
        are_numbers = all(count.isdecimal() for count in counts) and len("".join(counts)) <= _MOST_DIGITS
        launch = replace(launch, gpus=math.prod(map(int, counts)) if are_numbers else None)
    return launch


def values_of_launch(
    launch: Launch, content: Mapping[str, Any], table: ArgumentTable, problems: list[str]
) -> tuple[dict[str, Any], bool]:
    """The values of a command's arguments by name, and whether some names are of an older version; problems
    with other words are added to ``problems``. The section ``older`` of a table's ``content`` has today's
    ``names`` by the older names, and the ``defaults`` of a job with older names."""
    older: Mapping[str, Mapping[str, Any]] = content.get("older", {"names": {}})
    without = {f"${name}" for name in content["launch"].get("without", "").split()}
    kept = [w for w in launch.arguments if not without & {u.partition(",")[0] for u in unknown_in(w)[:1]}]
    launch = replace(launch, arguments=kept)
    split = [word.partition("=") for word in launch.arguments]
    is_older = any(name.lstrip("+~") in older["names"] for name, _, _ in split)
    words = [older["names"].get(name.lstrip("+~"), name) + equals + value for name, equals, value in split]
    read = overrides_of if content["launch"]["arguments"] == "KEY=VALUE" else options_of
    values = dict(read(words if is_older else launch.arguments, table, problems))
    return {**(older.get("defaults", {}) if is_older else {}), **values}, is_older


def _program(words: Sequence[str], programs: re.Pattern[str], kinds: Collection[str]) -> int | None:
    """The index of the program's file among a command's words; None if the command does not run the program
    with a first argument in ``kinds``."""
    ends = re.compile(rf"(?:\A|/)(?:{programs.pattern})\Z")
    at = next((at for at, word in enumerate(words) if ends.search(shown_word(word))), None)
    if at is None or words[0] in ("echo", "printf", "ls", "cp", "cat", "test", "[", "[["):
        return None
    return at if not kinds or {*words[at + 1 : at + 2]} & {*kinds} else None


def _gpus(
    words: Sequence[str], options: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """The number of a command's GPUs, by the words of its launcher, else by Slurm's ``options``, else by
    WORLD_SIZE; None and the reason if the script leaves the number open."""
    given: dict[str, str] = {}
    for word, following in pairwise([*words, ""]):
        name, _, value = word.partition("=")
        given.setdefault(name, value or following)
    torchrun = any(w.endswith("torchrun") or w.startswith("torch.distributed") for w in words)
    sources: list[Mapping[str, str]] = [given] if torchrun else [given, options]
    for source in sources:
        per_node = next((source[name] for name in _PER_NODE if name in source), None)
        nodes = next((source[name] for name in _NODES if name in source), "1" if torchrun else None)
        ranks = next((source[name] for name in _RANKS if name in source), None)
        if per_node is not None and nodes is not None:
            return _multiplied(per_node, nodes)
        if ranks is not None and not torchrun:
            return _multiplied(ranks)
    return _multiplied(environment["WORLD_SIZE"]) if "WORLD_SIZE" in environment else (None, "")


def _multiplied(*factors: str) -> tuple[int | None, str]:
    if unknown := [what for factor in factors for what in unknown_in(factor)]:
        return None, f"{unknown[0]} is not set in the script"
    if wrong := [factor for factor in factors if not re.fullmatch(r"[1-9]\d{0,5}", factor)]:
        return None, f"{wrong[0]!r} is no number of them"
    return math.prod(map(int, factors)), ""


def overrides_of(
    words: Sequence[str], table: ArgumentTable, problems: list[str]
) -> Iterator[tuple[str, Any]]:
    """Pairs of name and value in words KEY=VALUE, as Hydra parses them; other words go to ``problems``."""
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or unknown_in(name):
            _stray(word, problems)
            continue
        yield from _value(name.lstrip("+~"), text, table, problems)


def options_of(words: Sequence[str], table: ArgumentTable, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Pairs of name and value in words --NAME VALUE..., as argparse parses them, with ``_`` for dashes."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            _stray(word, problems)
            continue
        name, equals, text = word[2:].partition("=")
        texts = [text] if equals else []
        name = name.replace("-", "_")
        several = name in table.arguments and "list" in table.arguments[name].takes
        while not equals and rest and not rest[0].startswith("--"):
            if texts and not several and unknown_in(rest[0]) and "/" not in rest[0]:
                break  # what follows a value may be further arguments, but for a path
            texts.append(rest.pop(0))
        yield from _value(name, "true" if not texts else " ".join(texts), table, problems)


def _stray(word: str, problems: list[str]) -> None:
    """Add a problem with a word that belongs to no argument; ``"$@"`` is none, because it may be empty."""
    unknown = unknown_in(word)
    if not unknown:
        problems.append(f"{shown_word(word)!r} belongs to no argument")
    elif unknown[0] not in ("$@", "$*", "${@}", '"$@"'):
        problems.append(f"what arguments {unknown[0]} adds is not known; {given_flag(unknown[0])}")


def _value(name: str, text: str, table: ArgumentTable, problems: list[str]) -> Iterator[tuple[str, Any]]:
    argument = table.arguments.get(name)
    if argument is not None and argument.takes == "str" and not unknown_in(text.rpartition("/")[2]):
        text = shown_word(text)  # the folder of a model is not what its sizes are told by
    if unknown := unknown_in(text):
        if argument is not None and argument.outcome in ("mapped", "refused"):
            problems.append(
                f"{name}={shown_word(text)}: {unknown[0]} is not set in the script; {given_flag(unknown[0])}"
            )
            return
        yield name, shown_word(text)
        return
    plain = argument is not None and argument.takes in ("str", "str?")
    value = text if plain else scalar_of(text)
    kinds = argument.takes.split("/") if argument else []
    if "bool" in kinds and "int" not in kinds and value in (0, 1):
        value = bool(value)  # as transformers' HfArgumentParser takes it
    if "float" in kinds and isinstance(value, str):  # 1e-4 is a text in YAML
        try:
            value = float(value)
        except ValueError:
            value = text
    if "list" in kinds and isinstance(value, str):
        value = text.split()
    yield name, value
