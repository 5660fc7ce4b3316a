"""Jobs of Megatron-LM: a launch script or command line of pretrain_gpt.py or pretrain_bert.py, or the YAML of
one of its functional tests."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from spbench.bench.tools.jobs.account import Account, Given
from spbench.bench.tools.jobs.argument_tables import ProgramArgument, argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.launch import Launch, launched
from spbench.bench.tools.jobs.megatron_layers import length_of, pattern_of, set_schedule
from spbench.bench.tools.jobs.megatron_model import CONTAINER, container_problems, model_name, set_model
from spbench.bench.tools.jobs.rules import call
from spbench.bench.tools.jobs.shell import Shell
from spbench.bench.tools.jobs.shell_syntax import ShellError, given_flag, shown_word, unknown_in, words_in
from spbench.bench.tools.jobs.variables import variables
from spbench.bench.yaml_files import parse_yaml

_PROGRAMS = re.compile(r"(pretrain|train(?!_async)|finetune)_\w+\.py")
_TRAINS = {"pretrain_gpt.py": False, "pretrain_bert.py": True}
#: the sections of a functional test's file
_ARGUMENTS, _VARIABLES = "MODEL_ARGS", "ENV_VARS"
#: outcomes of arguments whose value does not matter
_WITHOUT_SETTING = ("no effect", "approximated")
#: by --cp-comm-type, the strategy of context parallelism, and whether its ranks take chunks in zigzag
CONTEXT = {"p2p": ("ring_attention", True), "a2a": ("ulysses", False), "all_gather": ("all_gather_kv", True)}
#: the strategy of context parallelism in two levels, and the --cp-comm-type for the strategy
HIERARCHICAL = "ulysses+ring_attention", "a2a+p2p"
_CONTEXTS = {**CONTEXT, HIERARCHICAL[1]: (HIERARCHICAL[0], True), "": ("", False)}
#: the argument with the ranks of each level of context parallelism in two levels
_LEVELS = "--hierarchical-context-parallel-sizes"
_SIZES = {
    axis: f"--{kind}-parallel-size"
    for axis, kind in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("sp", "context"))
}
_SCHEDULE = "--step-batch-size-schedule"


def read(files: JobFiles) -> Job | None:
    """A job of Megatron-LM; None if the file starts no program of Megatron-LM. UserError if the file cannot
    be read, is damaged, or starts several programs."""
    file = files.the_file()
    script = None if _is_yaml(file) else launched(file, _PROGRAMS, files.environment)
    launch = script or (_test(file, files.environment) if _is_yaml(file) else None)
    if launch is None:
        return None
    bert = _TRAINS.get(launch.program, False)
    given, wrong = parse(launch.arguments)
    further, worse = parse([*_given_words(files.environment)])
    given, wrong = {**given, **further}, [*wrong, *worse]
    exported = {name: text for name, text in launch.environment.items() if _argument(name) is None}
    account = megatron_account(given, exported)
    gpus = files.gpus if files.gpus is not None else launch.gpus
    problems = files.machine_problems(gpus)
    if launch.not_said and gpus is None:
        problems[0] += f" ({launch.not_said})"
    if launch.program not in _TRAINS:
        problems.insert(0, f"{launch.program} is none of {' and '.join(_TRAINS)}")
    if not wrong:
        make_settings(account, gpus, files.cluster, bert=bert)
        account.problems += container_problems(account)
    account.ignore("what the job needs of it is the same in all releases", CONTAINER)
    if (workspace := "CUBLAS_WORKSPACE_CONFIG") not in account.made_of:
        account.took("not before the arguments are right", workspace)
    account.problems[:0] = wrong
    return account.job("megatron", files, [*account.arguments(), *variables(account)], problems)


def megatron_account(given: Mapping[str, Given], environment: Mapping[str, str]) -> Account:
    """The account of a job's arguments of Megatron-LM, still without settings."""
    source = "default of Megatron-LM"
    return Account(table=argument_table("megatron"), given=given, environment=environment, by_default=source)


def make_settings(account: Account, gpus: int | None, cluster: str | None, *, bert: bool = False) -> None:
    """Add the settings of all arguments to an account; ``gpus``: the job's number, None if unknown."""
    set_model(account, bert=bert, cluster=cluster)
    call(account, "fp8")
    replicas = _set_parallelism(account, gpus)
    _set_batch(account, replicas)
    set_schedule(account)
    call(account, "optimizer")
    call(account, "userbuffers")
    account.unasked = f"{model_name(bert)} has no option for it"


def _given_words(environment: Mapping[str, str]) -> Iterator[str]:
    """The words of the arguments that --given sets, whose names may lack their dashes."""
    for name, value in environment.items():
        if (argument := _argument(name)) is not None:
            yield argument.name
            yield from value.split() if argument.takes else ()


def _argument(name: str) -> ProgramArgument | None:
    return argument_table("megatron").arguments.get(f"--{name.lstrip('-')}")


def parse(words: Sequence[str]) -> tuple[dict[str, Given], list[str]]:
    """The arguments in the words of a command line, as argparse parses them, but without abbreviations; if a
    name comes twice, the last counts.

    Returns:
        The arguments by their first spelling; and the problems, one for each argument that Megatron-LM's
            parser would refuse, or whose value is unknown before the job runs.
    """
    arguments: dict[str, Given] = {}
    problems: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            may_be, stray = _stray(word)
            arguments |= {name: given for name, given in may_be.items() if name not in arguments}
            problems += stray
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        argument = argument_table("megatron").arguments.get(name)
        while not equals and rest and not rest[0].startswith("--") and _takes_more(argument, len(values)):
            values.append(rest.pop(0))
        given, wrong = given_argument(shown_word(name), argument, values, equals)
        problems += wrong
        key = argument.name if argument else given.name
        before = arguments.pop(key, None)
        if before and argument and argument.outcome not in _WITHOUT_SETTING and str(before) != str(given):
            problems.append(f"{before} and {given} are both given; leave one")
        arguments[key] = given
    return arguments, problems


def _stray(word: str) -> tuple[dict[str, Given], list[str]]:
    """The arguments that a mark in a word that belongs to no argument may replace, if none of these arguments
    has an effect; else no arguments, and the problem with the word."""
    unknown = unknown_in(word)
    if not unknown:
        return {}, [f"{shown_word(word)!r} belongs to no argument"]
    may_be, _ = parse(words_in(word))
    known = [argument_table("megatron").arguments.get(given.name) for given in may_be.values()]
    if may_be and all(argument and argument.outcome in _WITHOUT_SETTING for argument in known):
        return may_be, []
    return {}, [f"what arguments {unknown[0]} adds is not known; {given_flag(unknown[0])}"]


def _takes_more(argument: ProgramArgument | None, have: int) -> bool:
    if argument is None or argument.count in ("+", "*"):
        return True
    return have < (int(argument.count[1:]) if argument.count else 1 if argument.takes else 0)


def given_argument(
    name: str, argument: ProgramArgument | None, words: Sequence[str], equals: str = ""
) -> tuple[Given, list[str]]:
    """An argument whose values are ``words``, and the problems with these words, one line each."""
    text = " ".join(map(shown_word, words))
    if argument is None:
        return Given(name, text, text), []
    if not argument.takes:
        return Given(name, True, text), [f"{name} takes no value, but has {text!r}"] if equals else []
    problems = []
    if not words and argument.count != "*":
        problems.append(f"{name} has no value")
    if (count := argument.count[1:]) and len(words) != int(count):
        problems.append(f"{name} takes {count} values, but has {len(words)}")
    unknown = [(word, what[0]) for word in words if (what := unknown_in(word))]
    if argument.outcome not in _WITHOUT_SETTING:
        problems += [
            f"{name} {shown_word(word)}: {what} is not set in the script; {given_flag(what)}"
            for word, what in unknown
        ]
    plain = [argument.wrong(argument.parsed(word)) for word in words if not unknown_in(word)]
    wrong = [*filter(None, plain), *(what for _, what in unknown), *([] if words else ["no value"])]
    problems += [f"{name}: {each}" for each in plain if each]
    return Given(name, argument.parsed(text) if len(words) == 1 else text, text, "".join(wrong[:1])), problems


def _is_yaml(file: JobFile) -> bool:
    marked = re.search(rf"^{_ARGUMENTS}:", file.text, re.MULTILINE)
    return file.path.suffix in (".yaml", ".yml") or bool(marked)


def _test(file: JobFile, environment: Mapping[str, str]) -> Launch | None:
    """The launch of a functional test's file, with its arguments and variables; the program is BERT's if the
    file is below a folder `bert`. None if the file has no arguments."""
    content = parse_yaml(file.path, file.content)
    arguments, variables = content.get(_ARGUMENTS), content.get(_VARIABLES) or {}
    if arguments is None:
        return None
    for section, names in ((_ARGUMENTS, arguments), (_VARIABLES, variables)):
        if not isinstance(names, dict) or not all(isinstance(key, str) for key in names):
            raise file.wrong(f"{section}: a mapping of names to values is needed")
    shell = Shell(dict(environment))
    try:
        texts = {name: shell.expand_text(_text(value)) for name, value in variables.items()}
        shell.variables.update(texts)
        words = [word for name, value in arguments.items() for word in _words(shell, name, value)]
    except ShellError as error:
        raise file.wrong(str(error)) from error
    bert = "bert" in file.path.parts[:-1]
    exported = {**environment, **texts}
    return Launch(1, "pretrain_bert.py" if bert else "pretrain_gpt.py", words, exported, None)


def _words(shell: Shell, name: str, value: Any) -> Iterator[str]:
    """The words for one argument of a functional test: for `true` only the name, for `false` no word."""
    if value is False or value is None:
        return
    yield name if name.startswith("--") else f"--{name}"
    if value is True:
        return
    values = value if isinstance(value, list) else [_text(value)]
    if isinstance(value, str) and (listed := re.fullmatch(r"\[([^][]*)\]|([\d ]+)", value.strip())):
        values = (listed[1] or listed[2] or "").split()
    yield from (shell.expand_text(_text(each)) for each in values)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _set_parallelism(account: Account, gpus: int | None) -> int | None:
    """Set strategy, sizes and mesh; returns the number of replicas, or None if it is unknown."""
    sizes = {axis: account.value(name) for axis, name in _SIZES.items()}
    if wrong := [name for axis, name in _SIZES.items() if sizes[axis] < 1]:
        account.problems.append(f"{account.spelled(wrong[0])} is no number of ranks")
        return None
    parts, expert_parts = prod(sizes.values()), account.value("--expert-tensor-parallel-size") or sizes["tp"]
    replicas = gpus // parts if gpus is not None and gpus % parts == 0 else None
    of_experts = (account.value("--expert-model-parallel-size") or 1) * expert_parts * sizes["pp"]
    split = ["--sequence-parallel"] if sizes["tp"] > 1 and account.has("--sequence-parallel") else []
    kinds = {*(account.value("--cp-comm-type") or "p2p").split()} if sizes["sp"] > 1 else {""}
    kind = kinds.pop() if len(kinds) == 1 else "several"
    context, zigzag = _CONTEXTS.get(kind, CONTEXT["p2p"])
    if exchanged := bool(pattern_of(account)) and context == CONTEXT["p2p"][0]:
        context, zigzag = CONTEXT["a2a"]
    levelled = [_LEVELS] if kind == HIERARCHICAL[1] else []
    levels = [int(size) for size in str(account.value(_LEVELS) or "").split()] if levelled else []
    inner, outer = levels if len(levels) == 2 else (sizes["sp"], None)
    outside = ["dp", "pp"] if account.has("--use-tp-pp-dp-mapping") else ["pp", "dp"]
    account.facts |= {
        "gpus": gpus,
        "parts": parts,
        "replicas": replicas,
        "expert_parts": expert_parts,
        "ranks_of_experts": of_experts,
        "uneven_experts": gpus is not None and gpus % of_experts > 0,
        "split": split,
        "strategy": "+".join(filter(None, ["megatron_sp" if split else "tensor_parallel", context])),
        "from_context": ["--context-parallel-size", "--cp-comm-type", *levelled] if context else [],
        "zigzag": zigzag,
        "exchanged": exchanged,
        "unlike": kind not in _CONTEXTS,
        "levelled": levelled,
        "inner": inner,
        "outer": outer,
        "other_levels": outer is not None and inner * outer != sizes["sp"],
        "axes": [*outside, *["cp"] * bool(levelled), "sp", "tp"],
    }
    call(account, "parallelism")
    return replicas


def _set_batch(account: Account, replicas: int | None) -> None:
    """Set the batch, the sequence length and the precision of a job with ``replicas`` (None: unknown)."""
    length, context = length_of(account), account.value("--context-parallel-size") or 1
    micro, total, schedule = map(account.value, ("--micro-batch-size", "--global-batch-size", _SCHEDULE))
    first = (str(schedule or "").split() or [""])[0].rpartition(":")[2]
    if schedule is not None:
        total = int(first) if first.isdecimal() else None
    at_once = 0 if micro is None or replicas is None else micro * replicas
    whole = at_once if total is None else total
    key = "--global-batch-size" if schedule is None else _SCHEDULE
    account.facts |= {
        "uneven_length": length is not None and context > 1 and length % (2 * context) > 0,
        "schedule": repr(schedule),
        "total_key": key,
        "by_default": "" if account.has(key) else " (by default)",
        "total": total,
        "replicas": replicas,
        "whole": whole,
        "divides": at_once > 0 and whole > 0 and whole % at_once == 0,
        "micro_batches": whole // at_once if at_once > 0 else None,
    }
    call(account, "batch")
