"""Jobs of accelerate by a script: `accelerate launch` with its options, and the Trainer's arguments after the
training script's name; its files (`--config_file`, a config.json) are given beside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table, table_content
from spbench.bench.tools.jobs.deepspeed import CLASSES, job_of_contents, sorted_files
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.launch import options_of, shell_of
from spbench.bench.tools.jobs.shell_syntax import shown_word

#: `accelerate launch`, or `python -m accelerate.commands.launch`
_STARTS = ("launch", "accelerate.commands.launch")
_LAUNCHER = re.compile(r"\baccelerate launch\b|\baccelerate\.commands\.launch\b")
#: scripts of programs that have readers of their own
_OF_OTHERS = ("pretrain_", "train_step")
#: scripts of TRL's trainers
_SCRIPTS = re.compile(r"(?:.*[_-])?(sft|dpo|grpo|kto|rloo|orpo|cpo|ppo|gkd|reward)(?:[_-].*)?\.py")


def read(files: JobFiles) -> Job | None:
    """A job that `accelerate launch` starts; None where the script has no such command.

    Raises:
        UserError: the script cannot be read, has several such commands, or one in a branch.
    """
    script = files.script
    words = _words(script, files) if script is not None and _LAUNCHER.search(script.text) else None
    if script is None or words is None:
        return None
    at = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if at is None or PurePosixPath(words[at]).name.startswith(_OF_OTHERS):
        return None
    problems: list[str] = []
    others = JobFiles([file for file in files.files if file is not script])
    contents = sorted_files(others, of_script=True)
    if contents is None:
        return None
    first = next(n for n, word in enumerate(words) if word in _STARTS) + 1
    own = _launcher(words[first:at], problems)
    trainer = dict(options_of(words[at + 1 :], _named("TrainingArguments."), problems))
    if any(word.startswith("--config_file") for word in words[:at]) and "accelerate" not in contents:
        problems.append("--config_file: give this configuration of accelerate beside")
    beside = {name: dict(contents.get(name, {})) for name in ("accelerate", "trainer")}
    contents = {
        **contents,
        CLASSES: contents[CLASSES] or _class_of_script(PurePosixPath(words[at]).name),
        "accelerate": {**beside["accelerate"], **own},
        "trainer": {**beside["trainer"], **trainer},
    }
    return job_of_contents("accelerate", contents, files, problems)


def _words(script: JobFile, files: JobFiles) -> Sequence[str] | None:
    """The words of the command that trains; None: there is none."""
    shell = shell_of(script, files.environment)
    commands = [(each, " ".join(map(shown_word, each.words))) for each in shell.commands]
    found = [each for each, text in commands if text.startswith("accelerate launch") or _STARTS[1] in text]
    if len(found) > 1:
        raise script.wrong("several commands train; leave one")
    if found and found[0].branch:
        raise script.wrong(
            f"line {found[0].line}: the command that trains is in a branch; write it by itself"
        )
    return found[0].words if found else None


def _named(prefix: str) -> ArgumentTable:
    """The arguments of the table of DeepSpeed whose names begin so, without that."""
    table = argument_table("deepspeed")
    names = {
        name.removeprefix(prefix): each for name, each in table.arguments.items() if name.startswith(prefix)
    }
    return ArgumentTable(table.program, names, {}, table.content)


def _launcher(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The options of the launcher as its file has them."""
    content: dict[str, Any] = {}
    launcher = table_content("accelerate")["launcher"]
    sections: Mapping[str, str] = launcher["sections"]
    for name, value in options_of(words, _named("accelerate."), problems):
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
    """The configuration of TRL that a script has by its name: sft.py is TRL's own, or one like it."""
    match = _SCRIPTS.fullmatch(name)
    return {f"{match[1].upper() if len(match[1]) < 6 else 'Reward'}Config": True} if match else {}
