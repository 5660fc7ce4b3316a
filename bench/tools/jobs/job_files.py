"""The files of a job, and which kind of job reads them.

Files of a program that spbench knows by name but does not read are refused, with advice.
"""

import fnmatch
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from spbench.bench.command_line.output import Output, Verbatim
from spbench.bench.errors import UserError, suggestion
from spbench.bench.errors import shown as quoted
from spbench.bench.files import decoded, parse_json, read_file, resolved, write_whole
from spbench.bench.tools.jobs import JOBS
from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.bench.tools.jobs.job import TABLES, Job, beside_peak, beyond_positions
from spbench.bench.yaml_files import parse_yaml

#: the most bytes of a job's file, because such files are written by hand
MOST_BYTES = 2**20
#: the key under which the fields of a config.json have the path of the file
MODEL_PATH = "path of the file"
#: how deep keys may be nested by which :func:`has_keys` recognizes a file
_MOST_NESTED = 3
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True)
class JobFile:
    """A file of a job, and its content.

    Attributes:
        part: the name of one configuration, if the file has several; "": the file has one.
    """

    path: Path
    content: bytes
    part: str = ""

    @property
    def text(self) -> str:
        """The file's content as text; UserError if the bytes are not UTF-8."""
        return decoded(self.path, self.content)

    def __str__(self) -> str:
        """The file's name, and the name of its ``part``, for messages and titles."""
        return ":".join(filter(None, [self.path.name, self.part]))

    def wrong(self, problem: str) -> UserError:
        """A UserError that names the file and the ``problem`` with it."""
        return UserError(f"{self.path}: {problem}")


class OneFileRead(UserError):
    """Several files were given, but this kind of job is one file."""


@dataclass(frozen=True)
class JobFiles:
    """The files of a job, with the options of the command that a reader needs.

    Attributes:
        gpus: the number of GPUs of the job; None: the number that the files say.
        cluster: the cluster on which the job runs; None: unknown.
        environment: variables that are set in addition to those of the files, by name.
    """

    files: Sequence[JobFile]
    gpus: int | None = None
    cluster: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The names of the files, with spaces between them."""
        return " ".join(str(file) for file in self.files)

    def the_file(self) -> JobFile:
        """The only file; :class:`OneFileRead` if there are several."""
        if len(self.files) != 1:
            raise OneFileRead(f"{self.title}: one file is read, but {len(self.files)} are given")
        return self.files[0]

    @property
    def script(self) -> JobFile | None:
        """The only script among scripts and configurations; None if there is no script, or several."""
        scripts = [file for file in self.files if file.path.suffix != ".py" and mapping_in(file) is None]
        return scripts[0] if len(scripts) == 1 else None

    @property
    def models(self) -> list[JobFile]:
        """The files that are a model's config.json: JSON, but no YAML, with a ``model_type``."""
        configurations = [file for file in self.files if file.path.suffix == ".json"]
        return [file for file in configurations if "model_type" in (mapping_in(file) or {})]

    def configuration(self, signs: Sequence[str]) -> Mapping[str, Any] | None:
        """The content of the file that has all keys of one of the signs (:func:`has_keys`). None if no file
        does, or if a further file is neither a config.json nor a configuration of DeepSpeed. UserError if a
        file is damaged."""
        configuration: Mapping[str, Any] | None = None
        for file in self.files:
            content = mapping_in(file) or {}
            if configuration is None and has_keys(content, signs):
                configuration = content
            elif "model_type" not in content and "zero_optimization" not in content:
                return None
        return configuration

    def machine_problems(self, gpus: int | None) -> list[str]:
        """Problems of a job whose GPUs or cluster nobody says; ``gpus``: the number that the files say."""
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
    strict: bool = False,
) -> Job:
    """The job that files describe.

    Args:
        kind: a name of :data:`JOBS`; None: the only kind whose reader accepts the files.
        files: the paths; ``FILE.py:NAME`` is one of several configurations in a file.
        gpus: the number of GPUs of the job; None: the number that the files say.
        environment: values that the files leave to run time: variables of scripts by name, keys of
            configurations by their dotted names.
        strict: the attribute of that name of :class:`Job`.

    Returns:
        The job, even if arguments of it are refused, unknown or missing: see :meth:`Job.refusal`.

    Raises:
        UserError: a file cannot be read or is damaged; there is no such kind; the files are a job of no kind,
            of several kinds, or of another kind.
    """
    if kind is not None and kind not in JOBS:
        raise UserError(f"unknown kind of job {kind!r}{suggestion(kind, JOBS.names())}")
    if not files:
        raise UserError("no file of a job is given")
    given = JobFiles([_read(file) for file in files], gpus, cluster, environment or {})
    for file in given.files:
        if other := other_program(file, "even_then"):
            raise file.wrong(other)
    kinds = [name for name in JOBS.names() if may_be(name, given)] if kind is None else [kind]
    jobs = _jobs(given, kinds, kind)
    for file in given.files if not jobs and kind is None else ():
        if other := other_program(file, "text"):
            raise file.wrong(other)
    if len(jobs) > 1:
        jobs.pop("megatron", None)  # its arguments are those of programs that contain it too
    if len(jobs) != 1:
        every = f"kinds: {', '.join(JOBS.names())}"
        what = f"a job of {' and of '.join(jobs)}: say which" if jobs else f"no job of {kind or 'any kind'}"
        raise UserError(f"{given.title}: {what} ({every})")
    return replace(next(iter(jobs.values())), strict=strict)


def may_be(kind: str, files: JobFiles) -> bool:
    """Whether one of the files has the signature of a kind of job: signs (:func:`has_keys`) in ``keys``, by
    version if there are several, and for a TOML also in ``toml``; or a regular expression ``text`` in a
    script, ``python`` in a Python file. For a kind without a signature the answer is always yes."""
    signature = JOBS.signature(kind)
    keys = signature.get("keys", [])
    signs = [*chain(*keys.values())] if isinstance(keys, Mapping) else keys
    return not signature or any(_has_signature(file, signature, signs) for file in files.files)


def _has_signature(file: JobFile, signature: Mapping[str, Any], signs: Sequence[str]) -> bool:
    suffix = file.path.suffix
    if suffix in _CONFIGURATIONS:
        return has_keys(mapping_in(file), [*signs, *(signature.get("toml", ()) if suffix == ".toml" else ())])
    pattern = signature.get("python" if suffix == ".py" else "text", "")
    return bool(pattern and re.search(pattern, file.text, re.MULTILINE))


def _jobs(given: JobFiles, kinds: Sequence[str], asked: str | None) -> dict[str, Job]:
    """The jobs that the readers of ``kinds`` make of the files, by kind; kinds that refuse are left out.
    ``asked``: the kind that the user named, whose error about several files is raised."""
    jobs: dict[str, Job] = {}
    for name in kinds:
        try:
            job = JOBS.load(name)(given)
        except OneFileRead:
            if asked is not None:
                raise
            continue  # so the files are of another kind
        if job is not None:
            jobs[name] = job
    return jobs


def path_and_part(word: Path | str) -> tuple[Path, str]:
    """The path of a file and ""; for FILE.py:NAME, the path of FILE.py and its configuration's NAME."""
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


@functools.lru_cache(maxsize=64)  # each program's signature and reader asks for the same files
def mapping_in(file: JobFile) -> Mapping[str, Any] | None:
    """The mapping in a YAML, JSON or TOML file; None for another file. UserError if the file is damaged."""
    if file.path.suffix in (".yaml", ".yml"):
        return parse_yaml(file.path, file.content)
    if file.path.suffix == ".json":
        content = parse_json(file.path, file.content)
        return content if isinstance(content, dict) else None
    if file.path.suffix != ".toml":
        return None
    try:
        return tomllib.loads(file.text)
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise file.wrong(f"no TOML: {line[:150] or 'nested too deep'}") from error


def other_program(file: JobFile, text: str) -> str:
    """The words on a file's program that spbench knows but does not read, and what to give instead; "" if
    the file is of no such program. ``text``: which regular expression of a program a script must match."""
    for name, program in table_content("other_programs").items():
        pattern = program.get(text, "")
        try:
            is_its = _has_signature(file, {"text": pattern, "python": pattern}, program.get("keys", ()))
        except UserError:
            return ""  # the file's reader reports the damage
        if is_its:
            article = "" if name.startswith("a ") else "a job of "
            return f"{article}{name}, which is not read here: {program['instead']}"
    return ""


def has_keys(content: Any, signs: Sequence[str]) -> bool:
    """Whether a configuration has all keys of one of the signs. A sign is a text of keys' names, with dots
    between nested keys, and ``*`` for any characters."""
    keys = [*_keys(content, "", 1)]
    return any(all(fnmatch.filter(keys, name) for name in sign.split()) for sign in signs)


def _keys(content: Any, above: str, depth: int) -> Iterator[str]:
    if isinstance(content, Mapping) and depth <= _MOST_NESTED:
        for key, value in content.items():
            yield f"{above}{key}"
            yield from _keys(value, f"{above}{key}.", depth + 1)


def imported(
    words: tuple[str, ...],
    gpus: int | None,
    cluster: str | None,
    explain: bool,
    strict: bool,
    given: Sequence[str],
    measured: Sequence[str],
    output: Path | None,
) -> Output:
    """The output of `spbench import`; the arguments are the options of the command."""
    kind, files = _kind_and_files(words)
    job = read_job(kind, files, gpus=gpus, cluster=cluster, environment=given_values(given), strict=strict)
    if not explain:
        job = replace(job, remarks=[*filter(None, [*job.remarks, beyond_positions(job.cell())])])
    if measured:
        records = beside_peak(job.cell(), measured)
        return Output([each["words"] for each in records], records, records, notes=job.warnings)
    if explain:
        table = TABLES.table("explained", f"{job.title}: arguments of {job.program}", job.arguments)
        content = {"program": job.program, "arguments": table.lines, "refusal": (refusal := job.refusal())}
        notes = [*job.warnings, *([f"no scenario: {refusal}"] if refusal else [])]
        return Output([table], content, table.lines, notes=notes)
    text = job.scenario_text(Path() if output is None else output.expanduser().parent)
    if output is None:
        return Output([Verbatim(text.removesuffix("\n"))], {"scenario": text}, [{"scenario": text}])
    if resolved(output) in [resolved(path_and_part(file)[0]) for file in files]:
        raise UserError(f"--output {output} is one of the files")
    if output.suffix not in (".yaml", ".yml"):
        output = output.with_name(f"{output.name}.yaml")
    write_whole(output, text)
    notes = [*job.warnings, f"to run it: spbench run --scenario {output}"]
    return Output((), {"file": str(output)}, [{"file": str(output)}], notes=notes, files=[output])


def given_values(words: Sequence[str]) -> dict[str, str]:
    """The values that the options --given set, by name. UserError if a word is not NAME=VALUE."""
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"--given {quoted(word)}: write NAME=VALUE, as TP=8 or distributed.dp_size=4")
        given[name] = value
    return given


def _kind_and_files(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The kind of job in the command's words (None if the first word is a file), and the files after it.
    UserError if there are no files."""
    first, *others = words
    if first in JOBS:
        if not others:
            raise UserError(f"no file of the job of {first} is given; spbench import {first} FILE...")
        return first, others
    if others and not path_and_part(first)[0].exists():
        raise UserError(f"{first!r} is neither a kind of job nor a file{suggestion(first, JOBS.names())}")
    return None, words
