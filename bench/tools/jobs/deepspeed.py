"""Jobs of DeepSpeed: its JSON, with a model's config.json, accelerate's YAML and the arguments of the
Trainer, of transformers or of TRL; these also as arguments in Python, which is not run, or in a script
behind `accelerate launch`.

Matmuls in eight bits of accelerate's configuration are TransformerEngine's or torchao's (accelerate 1.15,
utils/dataclasses.py: TERecipeKwargs and AORecipeKwargs).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import (
    OF_TRAINER,
    ArgumentTable,
    argument_table,
    flat,
    table_content,
)
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import MODEL_PATH, JobFile, JobFiles, mapping_in
from spbench.bench.tools.jobs.launch import launched, options_of
from spbench.bench.tools.jobs.python_values import training_script
from spbench.bench.tools.jobs.rules import Rule, Said, follow
from spbench.bench.tools.jobs.step_lines import precision_of, step_of, zero_of
from spbench.bench.tools.jobs.transformers_settings import set_step

_ACCELERATE = "accelerate."
#: the kind of "file" that names the configurations of TRL that a job has; the one of supervised tuning
CLASSES, _SFT = "classes", "SFTConfig"

#: `accelerate launch`, or `python -m accelerate.commands.launch`
_STARTS = ("launch", "accelerate.commands.launch")
_LAUNCHER = re.compile(r"\baccelerate launch\b|\baccelerate\.commands\.launch\b")
_COMMAND, _PROGRAM = r"accelerate launch\b|.*accelerate\.commands\.launch\b", re.compile(r"[\w.-]+\.py")
#: how the names of scripts begin whose programs have readers of their own
_OF_OTHERS = ("pretrain_", "train_step")
#: names of scripts that run TRL's trainers
_SCRIPTS = re.compile(r"(?:.*[_-])?(sft|dpo|grpo|kto|rloo|orpo|cpo|ppo|gkd|reward)(?:[_-].*)?\.py")

#: the content of a job's files by kind of file, a key in the section ``files`` of the table
Contents = Mapping[str, Mapping[str, Any]]


def read(files: JobFiles) -> Job | None:
    """A job of DeepSpeed; None if no file is a configuration of DeepSpeed or accelerate. UserError if a file
    is damaged, or two files are of one kind."""
    contents = sorted_files(files)
    return None if contents is None else job_of_contents("deepspeed", contents, files)


def sorted_files(files: JobFiles, *, of_script: bool = False) -> dict[str, Mapping[str, Any]] | None:
    """The content of each file by kind of file; None if no file is a configuration of DeepSpeed or
    accelerate, which files with a shell script that starts the job (``of_script``) need not be.

    Raises:
        UserError: a file is damaged, two files are of one kind, or one file of the job is of no kind.
    """
    table = table_content("deepspeed")
    contents: list[tuple[JobFile, Mapping[str, Any]]] = []
    script: Contents = {}
    for file in files.files:
        if file.path.suffix == ".py" and (of_script or len(files.files) > 1):
            script = training_script(file, files.environment)
        else:
            contents.append((file, mapping_in(file) or {}))
    kinds = [_kind(content) for _, content in contents]
    are_read = (
        of_script or {"accelerate", "deepspeed"} & {*kinds} or any(_trains(each) for _, each in contents)
    )
    scripts = not of_script and any(file.path.suffix in (".sh", ".bash", ".slurm") for file in files.files)
    others = {*table["of_other_programs"].split()}
    if not are_read or scripts or any(others & {*content} for _, content in contents):
        return None
    by_kind: dict[str, Mapping[str, Any]] = {}
    names = {kind: each["called"] for kind, each in table["files"].items()}
    for (file, content), kind in zip(contents, kinds, strict=True):
        if not kind:
            raise file.wrong(f"not one of the files of a DeepSpeed job ({', '.join(names.values())})")
        if kind in by_kind:
            raise file.wrong(f"a second {names[kind]}; one is read")
        by_kind[kind] = {**content, MODEL_PATH: str(file.path)} if kind == "model" else content
    for kind, content in script.items():
        by_kind[kind] = {**content, **by_kind.get(kind, {})}
    by_kind.setdefault(CLASSES, {})
    trainer = by_kind.get("trainer", {})
    if not script and ({*table["of_trl"].split()} & {*trainer} or _trains(trainer)):
        by_kind[CLASSES] = {_SFT: True}
    return by_kind


def _kind(content: Mapping[str, Any]) -> str:
    """The kind of a file with this content, by its keys; "" if the file is of no kind."""
    files = table_content("deepspeed")["files"]
    return next((kind for kind, each in files.items() if {*each["keys"].split()} & {*content}), "")


def _trains(content: Mapping[str, Any]) -> bool:
    """Whether a file of the Trainer's arguments is a whole job of TRL, because it names a model and data."""
    return {"model_name_or_path", "dataset_name"} <= {*content}


def job_of_contents(kind: str, contents: Contents, files: JobFiles, problems: list[str] | None = None) -> Job:
    """The job in ``contents``, the files' contents by kind; ``problems``: problems with the job's launch."""
    account = key_account(_table(_SFT in contents[CLASSES]), _named(contents), overrides=files.environment)
    for name in contents[CLASSES]:
        if name != _SFT:
            missing = f"{name} of TRL: preferences, rewards or reinforcement learning: not modelled"
            account.problems.append(missing)
    accelerates, distributed = contents.get("accelerate", {}), account.value("accelerate.distributed_type")
    if distributed is None:
        of_deepspeed = "deepspeed" in contents or "deepspeed_config" in accelerates
        distributed = "FSDP" if "fsdp_config" in accelerates else "DEEPSPEED" if of_deepspeed else "NO"
    account.facts |= {
        "trl": _SFT in contents[CLASSES],
        "trainer": "trainer" in contents,
        "deepspeed": "deepspeed" in contents,
        "distributed": distributed,
        "processes_asked": files.gpus,
    }
    follow(account, account.table.content["rules"])
    set_step(account, step_of(account, _FUNCTIONS), files)
    return account.job(kind, files, account.arguments(), problems or ())


def _table(of_trl: bool) -> ArgumentTable:
    """The table of DeepSpeed's arguments, with TRL's defaults if ``of_trl``."""
    table = argument_table("deepspeed")
    defaults = table.content["defaults_of_trl"] if of_trl else {}
    own = {name: replace(table.arguments[name], default=value) for name, value in defaults.items()}
    return replace(table, arguments={**table.arguments, **own})


def _named(contents: Contents) -> Iterator[tuple[str, Any]]:
    """Pairs of a key's name in the table and its value, for all files but the model's."""
    table = argument_table("deepspeed")
    arguments, aliases = table.arguments, table.content["aliases"]
    for name, value in flat(contents.get("deepspeed", {}), arguments):
        yield aliases.get(name, name), value
    for kind, name in (("trainer", OF_TRAINER), ("accelerate", _ACCELERATE)):
        yield from flat(contents.get(kind, {}), arguments, name)


def _most_of(account: Account, line: Rule) -> Said:
    """The line ``most_of``: the largest value of several keys that count the ranks of a sequence; ``alone``:
    the key that may not be combined with another one."""
    names, alone = line["most_of"].split(), line["alone"]
    sizes = {name: account.count(name) for name in names}
    asked = [name for name, ranks in sizes.items() if ranks > 1]
    if len({sizes[name] for name in asked}) > 1 or (sizes[alone] > 1 and len(asked) > 1):
        account.problems.append(f"{' and '.join(map(account.spelled, asked))}: leave one")
    return Said(max(sizes.values()), account.given_of(*(asked or sizes)))


def _counted(account: Account, line: Rule) -> Said:
    """The line ``counted``: the value of DeepSpeed's key for a count; if the value is "auto" or missing, the
    value of the Trainer's key ``beside``; None if the job gives no such value."""
    own, beside, of_trainer = line["counted"], line["beside"], account.facts["trainer"]
    accelerates = f"accelerate.deepspeed_config.{own}"
    names = [own, *([accelerates] if accelerates in account.program_arguments else [])]
    value, name = account.chosen(*names, beside)
    if name != beside:
        if of_trainer and account.has(beside) and account.value(beside) != value:
            both = f"{account.spelled(name)} and {account.spelled(beside)}"
            account.problems.append(f"{both} differ; leave one, or say auto")
        account.took(f"as {name}", beside)
        return Said(value, (name,))
    if not of_trainer and not account.has(beside):
        if any(account.given[each].value == "auto" for each in account.given_of(*names)):
            account.problems.append(f"{own} is auto, but no Trainer's arguments are given beside")
        return Said(None, (own,))
    return Said(value, (beside,))


def _alike(account: Account, line: Rule) -> Said:
    """The line ``alike``: the value of keys that mean the same in different scripts; a problem if their
    values differ."""
    names = line["alike"].split()
    given = account.given_of(*names) or names[:1]
    if len({account.value(each) for each in given}) != 1:
        account.problems.append(f"{' and '.join(given)} differ")
    return Said(account.value(given[0]), given)


def _mixed(account: Account, line: Rule) -> Said:
    """The line ``mixed``: the precision by accelerate's key ``mixed``, DeepSpeed's keys and the Trainer's."""
    mixed = line["mixed"]
    value = account.value(mixed)
    asked = {"bf16": [mixed] * (value in ("bf16", "fp8")), "fp16": [mixed] * (value == "fp16")}
    for kind, names in asked.items():
        own, trainers = f"{kind}.enabled", f"{OF_TRAINER}{kind}"
        value, name = account.chosen(own, trainers)
        if name == own and account.has(trainers) and account.value(trainers) != value:
            account.problems.append(f"{account.spelled(own)} and {account.spelled(trainers)} differ")
        names[:0] = account.given_of(own, trainers) if value is True else ()
        account.ignore(f"{kind} is off", own, trainers)
    account.ignore("none is asked for", mixed)
    if account.facts["trl"] and not any(asked.values()) and not account.has(f"{OF_TRAINER}bf16"):
        return Said("bf16", (), "TRL's default")
    return precision_of(account, asked["bf16"], asked["fp16"])


def _messages(account: Account, line: Rule) -> Said:
    """The line ``messages``: the type in which gradients are summed over ranks, by the key ``messages``, else
    the weights' type. If ranks share sequences, DeepSpeed sums in float32, unless the key ``of_parts`` or
    accelerate's key ``beside`` says otherwise."""
    of_wholes, of_parts, beside = line["messages"], line["of_parts"], line["beside"]
    precision, cut = account.facts["precision"], account.facts["sequence"] > 1
    if cut and account.has(beside) and not account.has(of_parts):
        of_parts = beside
    name, other = (of_parts, of_wholes) if cut else (of_wholes, of_parts)
    account.ignore("of DeepSpeed, whose own key counts", beside)
    account.ignore(f"{name} holds where sequences are {'cut' if cut else 'whole'}", other)
    asked = str(account.value(name)).lower() if account.value(name) is not None else precision
    if asked not in (precision, "fp32"):
        account.refuse(f"gradients of {precision} that are sent in {asked}", name)
    return Said("fp32" if asked == "fp32" else "weights", (name,))


_FUNCTIONS = {
    **{each.__name__.removeprefix("_"): each for each in (_most_of, _counted, _alike, _mixed, _messages)},
    "zero": lambda account, line: zero_of(account, line["zero"], line["beside"]),
}


def read_script(files: JobFiles) -> Job | None:
    """A job that `accelerate launch` starts; None where the script has no such command. UserError if the
    script cannot be read, has several such commands, or one in a branch."""
    script = files.script
    if script is None or not _LAUNCHER.search(script.text):
        return None
    launch = launched(script, _PROGRAM, files.environment, launcher=_COMMAND)
    if launch is None or launch.program.startswith(_OF_OTHERS):
        return None
    problems: list[str] = []
    others = JobFiles([file for file in files.files if file is not script])
    contents = sorted_files(others, of_script=True)
    if contents is None:
        return None
    first = next(n for n, word in enumerate(launch.launcher) if word in _STARTS) + 1
    own = _options_of_launcher(launch.launcher[first:], problems)
    trainer = dict(options_of(launch.arguments, _with_prefix("TrainingArguments."), problems))
    asks = any(word.startswith("--config_file") for word in launch.launcher)
    if asks and "accelerate" not in contents:
        problems.append("--config_file: give this configuration of accelerate beside")
    beside = {name: dict(contents.get(name, {})) for name in ("accelerate", "trainer")}
    contents = {
        **contents,
        CLASSES: contents[CLASSES] or _class_of_script(launch.program),
        "accelerate": {**beside["accelerate"], **own},
        "trainer": {**beside["trainer"], **trainer},
    }
    return job_of_contents("accelerate", contents, files, problems)


def _with_prefix(prefix: str) -> ArgumentTable:
    """The arguments in DeepSpeed's table whose names begin with ``prefix``, which their new names lack."""
    table = argument_table("deepspeed")
    names = {
        name.removeprefix(prefix): each for name, each in table.arguments.items() if name.startswith(prefix)
    }
    return ArgumentTable(table.program, names, {}, table.content)


def _options_of_launcher(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The options of `accelerate launch`, as the keys that accelerate's configuration file has for them."""
    content: dict[str, Any] = {}
    launcher = table_content("accelerate")["launcher"]
    sections: Mapping[str, str] = launcher["sections"]
    for name, value in options_of(words, _with_prefix("accelerate."), problems):
        prefix = next((each for each in sections if name.startswith(f"{each}_")), None)
        if name in launcher["distributed_type"]:
            content["distributed_type"] = launcher["distributed_type"][name]
        elif prefix is not None:
            content.setdefault(sections[prefix], {})[name] = value
        elif name in launcher["deepspeed_config"].split():
            content.setdefault("deepspeed_config", {})[name] = value
        elif name not in launcher["nowhere"].split():
            content[name] = value
    return content


def _class_of_script(name: str) -> Mapping[str, bool]:
    """The configuration of TRL by a script's name: SFTConfig for sft.py; empty if the script is another."""
    match = _SCRIPTS.fullmatch(name)
    return {f"{match[1].upper() if len(match[1]) < 6 else 'Reward'}Config": True} if match else {}


read_accelerate = read_script
"""Jobs of accelerate by a script: `accelerate launch` with its options, and the Trainer's arguments after the
training script's name; its files (`--config_file`, a config.json) are given beside."""
