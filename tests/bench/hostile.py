"""Damaged inputs of every kind that commands read: files, and the command line that reads them.

A case follows from its kind and number alone.
"""

import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.tools.changes.record_command import content_of
from tests.bench.damage import DUMPS, ROWS, TEXTS, mutated, with_wrong_values
from tests.grid import data
from tests.tools.changes.records import cell, commit, record
from tests.tools.changes.rows import CLAIM, folder
from tests.tools.jobs.job_inputs import GIVEN, GPUS, INPUTS, JOBS

_TABLES: dict[str, Any] = data(__file__)
SAMPLES = Path(__file__).parents[1] / "tools" / "calibrate" / "samples"


def split(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


#: words that may stand where a value belongs
WORDS = (
    *split(
        "-1 0 1e999 nan inf -inf 0x 060 1:30 8k .5M 128,000 131_072 8Ki 1e6 on no ~ null [] {} [[1]] = <<"
    ),
    *split(
        "*x 2024-13-45 ../.. / /dev/zero /proc/self/mem a/b a.b=c a=b=c , ,, =x x= %s {0} $HOME - -- + all"
    ),
    *split("gate/ meta-llama/Llama-3-8B bert-tiny+ ulysses+ulysses !!python/object:os.system"),
    *("", " ", "{a: 1}", "!!timestamp y", "!!bool x", "!!int x", "&a [*a]", "a: b: c", "'", '"\\ud800"'),
    *("\udcff", "ä\n", "\x00", "\x07", "\u202e", "\u0663"),
    *("1" * 5000, "x" * 5000, "9" * 40, "[" * 5000, "{a: " * 500, "x " * 2000),
)
BOMB = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 9)}]}}\n" for i in range(11)
)
LAUGHS = BOMB.replace("{<<: ", "").replace("]}", "]")
#: what results are exported to
SYSTEMS = ("markdown", "junit", "hud", "github-action", "pytest-benchmark")
CELL = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 8%s}"


@dataclass(frozen=True)
class Case:
    """Files by name, and a command line that is run in their folder."""

    files: Mapping[str, bytes]
    words: Sequence[str]
    #: of files: "loop", "dangling" or "folder" in the place of a content
    special: Mapping[str, str] = ()  # type: ignore[assignment]


def _one_of(chance: random.Random, texts: Mapping[str, bytes]) -> dict[str, bytes]:
    name = chance.choice([*texts])
    return {**texts, name: mutated(texts[name], chance)}


_DRY = ("run", "s.yaml", "--dry-run", "--variant", "a", "--output", "none")
_SCENARIO = {name: text.encode() for name, text in TEXTS.items()}


def scenarios(chance: random.Random) -> Case:
    """A scenario with its cluster, config.json and published tables, one of them damaged."""
    return Case(_one_of(chance, _SCENARIO), _DRY)


def contents(chance: random.Random) -> Case:
    """The same, with wrong values in one of them."""
    name = chance.choice([*DUMPS])
    content, dump = DUMPS[name]
    text = dump(with_wrong_values(content, chance))
    return Case({**_SCENARIO, name: text.encode("utf-8", "surrogatepass")}, _DRY)


def values(chance: random.Random) -> Case:
    """A scenario of one cell with a hostile value for one of its settings."""
    keys = (
        "batch seq_len model strategy cluster engine precision sizes mesh rank timing timeout_s meters search"
    )
    keys += " learning model_options strategy_options training variant device paper"
    key = chance.choice([*split(keys), "training: {steps", "model_options: {layers", "sizes: {tp"])
    value = chance.choice(WORDS) + "}" * key.count("{")
    text = f"title: t\ngroups:\n  - {CELL % f', {key}: {value}'}\n"
    return Case({"s.yaml": text.encode("utf-8", "surrogatepass")}, ("run", "s.yaml", "--dry-run"))


def clusters(chance: random.Random) -> Case:
    """A cluster file, damaged, as it is listed."""
    return Case({"mine.yaml": mutated(_SCENARIO["mine.yaml"], chance)}, ("list", "cluster", "mine.yaml"))


def configs(chance: random.Random) -> Case:
    """A config.json, damaged, as the model of a scenario."""
    return Case({**_SCENARIO, "config.json": mutated(_SCENARIO["config.json"], chance)}, _DRY)


@cache
def _results(place: Path) -> dict[str, bytes]:
    made = folder(place / "base", ROWS, CLAIM)
    return {path.name: path.read_bytes() for path in made.iterdir()}


def results(chance: random.Random) -> Case:
    """Rows or comparisons, damaged, compared with whole ones, exported or recorded."""
    whole = _results(Path.cwd())
    name = chance.choice([*whole])
    files = {f"{side}/{each}": content for side in ("new", "old") for each, content in whole.items()}
    files[f"new/{name}"] = mutated(whole[name], chance)
    export = ("export", "--to", chance.choice(SYSTEMS), "new", "--output", "out")
    kept = ("record", "new", "--history", "h", "--commit", "0" * 40)
    lines = (("compare", "old", "new"), ("compare", "new", "old"), export, (*export, "--base", "old"), kept)
    return Case(files, chance.choice(lines))


def history_files() -> dict[str, bytes]:
    """Three records, a target and a change that was meant."""
    cells = [cell("a", sent_bytes=7), cell("b", exact=False, step_time_s=[0.1, 0.3, 0.2])]
    texts = {f"{n}.jsonl": content_of(record(n, *cells)) for n in (1, 2, 3)}
    texts["targets.yaml"] = "targets:\n  - {suite: nightly, cell: a, metric: sent_bytes, value: 12}\n"
    texts["meant.yaml"] = f"meant:\n  - {{commit: '{commit(2).short}', metric: sent_bytes, reason: more}}\n"
    return {f"h/{name}": text.encode() for name, text in texts.items()}


def histories(chance: random.Random) -> Case:
    """A history, one of its files damaged."""
    return Case(_one_of(chance, history_files()), ("history", "h", "--fail-on-regression"))


def logs(chance: random.Random) -> Case:
    """The log of a benchmark or profiler, damaged, as rates are read from it."""
    path = chance.choice(sorted(SAMPLES.iterdir()))
    words = ("calibrate", "--from", path.name, "--extends", "dgx-h100", "--output", "made.yaml")
    return Case({path.name: mutated(path.read_bytes(), chance)}, words)


def jobs(chance: random.Random) -> Case:
    """The files of a job, one of them damaged, as they are imported."""
    name = chance.choice([*JOBS])
    kind, files = JOBS[name]
    whole = {file: (INPUTS / file).read_bytes() for file in files}
    given = [f"--given={name}={value}" for name, value in GIVEN.get(kind, {}).items()]
    words = ("import", kind, *files, "--cluster", "dgx-h100", "--gpus", str(GPUS.get(name, 8)), *given)
    return Case(_one_of(chance, whole), words)


def lengths(chance: random.Random) -> Case:
    """A list of lengths of documents, damaged, as .txt, .csv or .npy."""
    import numpy as np

    numbers = [3, 5, 8, 13, 21, 34]
    binary = io.BytesIO()
    np.save(binary, np.array(numbers))
    text = "\n".join(map(str, numbers)).encode()
    suffix, whole = chance.choice([(".npy", binary.getvalue()), (".txt", text), (".csv", b"length\n" + text)])
    place = chance.randrange(min(130, len(whole)))
    content = whole[:place] + bytes([chance.randrange(256)]) + whole[place + chance.randrange(3) :]
    options = f", model_options: {{documents: ./d{suffix}, documents_seed: 1}}"
    cell = (
        (CELL % options).replace("bert-tiny", "causal-transformer-tiny").replace("seq_len: 8", "seq_len: 64")
    )
    scenario = f"title: t\ngroups:\n  - {cell}\n".encode()
    return Case({f"d{suffix}": content, "s.yaml": scenario}, ("run", "s.yaml", "--dry-run"))


OPTIONS = [
    *((*split(start), flag) for start, flags in _TABLES["flags"].items() for flag in split(flags)),
    *((*split(start), "") for start in _TABLES["alone"]),
]
_PLAIN = f"title: t\ngroups:\n  - {CELL % ''}\n".encode()


def options(chance: random.Random) -> Case:
    """A hostile word as the value of an option or as an argument."""
    *words, last = chance.choice(OPTIONS)
    word = chance.choice(WORDS)
    words += [last + word] if last.endswith("=") else [last, word] if last else [word]
    return Case({"s.yaml": _PLAIN}, [each.replace("\x00", "") for each in words])


#: contents that no reader expects
CONTENTS: Mapping[str, bytes] = {
    "empty": b"",
    "mark": b"\xef\xbb\xbf" + _PLAIN,
    "utf-16": _PLAIN.decode().encode("utf-16"),
    "latin": "title: ä".encode("latin-1"),
    "lines": _PLAIN.replace(b"\n", b"\r\n"),
    "zeros": bytes(2000),
    "bomb": BOMB.encode(),
    "laughs": b"title: x\n" + LAUGHS.encode(),
    "laughing title": LAUGHS.encode() + b"title: *j\ngroups: [*j]\n",
    "large": b"[" + b"1," * 600_000 + b"]",
    "deep": b"[" * 100_000,
    "deep json": b'{"a":' * 50_000,
    "tag": b"title: !!timestamp y\ngroups: [{}]\n",
    "number": b"9" * 10_000,
    "surrogate": b'{"title": "\\ud800", "groups": [{"model": "\\ud800"}]}',
}
_READERS = list(map(split, _TABLES["readers"]))


def files(chance: random.Random) -> Case:
    """A file, link, folder or device that is none of what the option takes."""
    suffix = chance.choice([".yaml", ".json", ".py", ".toml", ".txt", ".npy", ".csv", ".sh", ".jsonl", ""])
    kind = chance.choice(["content"] * 3 + ["loop", "dangling", "folder", "place"])
    name = chance.choice(_TABLES["places"]) if kind == "place" else f"x{suffix}"
    words = [word.replace("{}", name) for word in chance.choice(_READERS)]
    found = {"s.yaml": _PLAIN}
    if kind == "content":
        found[name] = chance.choice([*CONTENTS.values()])
    return Case(found, words, {name: kind} if kind in ("loop", "dangling", "folder") else {})


def programs(chance: random.Random) -> Case:
    """A Python file of a strategy or model that misbehaves as it is imported."""
    head = "import spbench\nclass E(Exception):\n    def __str__(self): raise KeyError\n"
    text = head + chance.choice(_TABLES["bodies"]) + "\n"
    name = f"f{chance.randrange(10**6)}.py"
    kind = chance.choice(["--strategy", "--model"])
    commands = (("run", "s.yaml", "--dry-run", kind, name), ("list", "strategies", kind, name))
    return Case({name: text.encode(), "s.yaml": _PLAIN}, chance.choice(commands))


#: how many of 10,000 are of each kind
KINDS: Mapping[str, tuple[Callable[[random.Random], Case], int]] = {
    "scenario files": (scenarios, 1000),
    "values of settings": (values, 800),
    "cluster files": (clusters, 800),
    "config.json": (configs, 800),
    "contents": (contents, 1000),
    "results": (results, 1000),
    "histories": (histories, 500),
    "logs": (logs, 1000),
    "job files": (jobs, 5000),
    "packed lists": (lengths, 700),
    "option strings": (options, 1000),
    "special files": (files, 600),
    "Python files": (programs, 100),
}


def case(kind: str, number: int) -> Case:
    """The case of a kind with that number."""
    return KINDS[kind][0](random.Random(f"{kind} {number}"))


def as_json(case: Case) -> str:
    """A case for a person, its files cut."""
    return json.dumps([list(case.words), {name: repr(content[:300]) for name, content in case.files.items()}])
