"""Rules of a program's table: under which conditions what becomes of arguments, and what a job says of one
thing.

A *condition* is words that all hold, or a list of such texts of which one holds. A word is

``NAME``
    its value is neither null, false, 0 nor empty;
``NAME?``
    the job gives it, or a variable of the environment;
``NAME=VALUE|VALUE``
    its value is one of these, as YAML has it;
``NAME>NUMBER``, ``NAME<NUMBER``
    its value is a number that is more, or less; the NUMBER may be that of another NAME;
``!WORD``
    that word does not hold.

A ``*`` in a NAME that may be given, or in a VALUE, stands for any characters. NAME is an argument, a variable
of the environment, or ``$FACT``: what the reader has worked out itself (:attr:`Account.facts`).

A *rule* is a mapping of one verb (see :func:`follow`), with ``keys``, the arguments that it is said of, and
perhaps ``if``, a condition; or of ``if``, ``then`` and ``else``, which are rules. ``each`` has words, for
each of which the rule is read with the word in place of its ``%``. In its texts ``{NAME}`` is an argument as
the job has it, and ``{NAME=}`` its value.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import shown, table_content

_WORD = re.compile(r"(!?)([^?=<>!]+)(?:(\?)|([=<>])(.*))?")
_NAMED = re.compile(r"\{([^{}\s]+?)(=?)\}")

Condition = str | Sequence[str]
Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """A job's word on one thing: the value, the keys that it came from, a note beside the setting."""

    value: Any
    names: Sequence[str] = ()
    note: str = ""


#: by the word of a line that calls it: what reads such a line; a mapping it returns has several fields
Functions = Mapping[str, Callable[[Account, Rule], Any]]


def written(value: Any) -> str:
    """A value as the conditions of rules spell it."""
    return value if isinstance(value, str) else shown(value, sys.maxsize)


def holds(account: Account, condition: Condition) -> bool:
    """Whether a condition holds; an empty one does."""
    if not isinstance(condition, str):
        return any(holds(account, each) for each in condition)
    return all(_word_holds(account, word) for word in condition.split())


def _word_holds(account: Account, word: str) -> bool:
    match = _WORD.fullmatch(word)
    assert match, word
    negated, name, is_given, sign, text = match.groups()
    if is_given:
        names = (*account.given, *account.environment)
        result = any(fnmatchcase(each, name) for each in names) if "*" in name else name in names
    elif sign is None:
        result = bool(account.known(name))
    elif sign == "=":
        value = written(account.known(name))
        result = any(fnmatchcase(value, each) if "*" in each else value == each for each in text.split("|"))
    else:
        value = account.known(name)
        number = float(text) if text[:1].isdecimal() else account.known(text)
        result = isinstance(value, int | float) and (value > number if sign == ">" else value < number)
    return bool(result) != bool(negated)


def follow(account: Account, rules: Sequence[Rule]) -> None:
    """Do what rules say, in their order. A verb is a method of :class:`Account` of its name, or ``problem``
    or ``remark``, with a text; ``set``, with the path of a setting and a line (:func:`said_of`); ``add``,
    likewise, with its ``source`` or ``keys``, of which nothing is said then; ``flag``, with an argument, a
    line (none: a switch that is on) and the ``setting`` that asks for it; or ``call``, with a name
    (:func:`call`)."""
    for rule in rules:
        for word in str(rule.get("each", "")).split() or [""]:
            _follow(account, _with_word(rule, word) if word else rule)


def call(account: Account, name: str) -> None:
    """Call the reader's function of that name (:attr:`Account.calls`), or follow the table's rules of that
    name."""
    if name in account.calls:
        account.calls[name](account)
    else:
        follow(account, account.table.content["rules"][name])


def _with_word(part: Any, word: str) -> Any:
    """A rule, or a part of it, with ``word`` in place of each ``%``."""
    if isinstance(part, str):
        return part.replace("%", word)
    if isinstance(part, Mapping):
        return {key: _with_word(each, word) for key, each in part.items()}
    return [_with_word(each, word) for each in part] if isinstance(part, list) else part


def _follow(account: Account, rule: Rule) -> None:
    if not holds(account, rule.get("if", "")):
        follow(account, rule.get("else", ()))
        return
    follow(account, rule.get("then", ()))
    names = names_of(account, rule.get("keys", ""))
    texts = {key: filled(account, text) for key, text in rule.items() if isinstance(text, str)}
    match texts:
        case {"stand_in": missing}:
            moved = texts if "because" in texts else table_content("transformers")["stand_ins"][missing]
            account.stand_in(missing, moved["may_move"], moved["because"], *names)
        case {"leave": what, "because": because}:
            account.leave(what, because, *names)
        case {"problem": problem}:
            account.problems.append(problem)
        case {"remark": remark}:
            account.remarks.append(remark)
        case {"set": path}:
            # the `else` of a rule with a condition is rules, not the value of a line
            line = {key: rule[key] for key in rule if key != "else"} if "if" in rule else rule
            said = said_of(account, line)
            named = names if "keys" in rule else rule.get("of", "").split()
            account.set(path, said.value, *named, note=said.note)
        case {"add": path}:
            source = texts.get("source", ", ".join(map(account.spelled, names)))
            account.add(path, said_of(account, rule).value, source)
        case {"flag": name}:
            line = {key: rule[key] for key in rule if key not in ("if", "else")} if "if" in rule else rule
            value = said_of(account, line).value if {"value", "of"} & rule.keys() else True
            account.flags.append((name, value, texts["setting"]))
        case {"call": name}:
            call(account, name)
        case {"map": words} | {"map_given": words} | {"count": words}:
            (verb,) = {"map", "map_given", "count"} & texts.keys()
            for name in words.split():
                getattr(account, verb)(name)
        case _:
            for verb in ("ignore", "took", "refuse", "refuse_given", "approximate"):
                if verb in texts:
                    getattr(account, verb)(texts[verb], *names)


def names_of(account: Account, words: str) -> list[str]:
    """Arguments by words: their names; names with a ``*``; ``NAME|NAME``, of which the first that is given
    counts; and ``$FACT``, which is names."""
    names: list[str] = []
    for word in words.split():
        if word.startswith("$"):
            fact = account.facts[word[1:]]
            names += fact.split() if isinstance(fact, str) else fact
        elif "|" in word:
            names.append(account.chosen(*word.split("|"))[1])
        elif "*" in word:
            names += [name for name in account.program_arguments if fnmatchcase(name, word)]
        else:
            names.append(word)
    return names


def filled(account: Account, text: str) -> str:
    """A text of a rule, with values in place of the names in it."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("$"):
            return written(account.known(name))
        if match[2]:
            return shown(account.known(name))
        return account.spelled(name) if name in account.given or name in account.environment else name

    return _NAMED.sub(value, text)


def said(account: Account, *names: str, note: str = "") -> Said:
    """The value of the first key that is given and not null, and that key; else the last key's default."""
    value, first = account.chosen(*names)
    return Said(value, account.given_of(first), note)


def said_of(account: Account, line: Any, functions: Functions | None = None) -> Any:
    """What a job says of one thing, such as its length, by a line of its program's table.

    Args:
        line: keys of a job, of which the first that is given counts, or ``$FACT``; a list of lines, of which
            the first counts whose ``if`` holds; or a mapping that has a word of ``functions``, or
            ``value``, which all jobs have; ``any``, keys, of which one is true for the value ``then``, and
            ``else``; or
            ``of``, such keys as above, in small letters where it is ``lower``, ``words`` by the keys' value,
            ``patterns``, regular expressions of whole texts and what becomes of these, and ``else``, for any
            other (if not: the value), or lines of which one says it; or ``or``, in place of a value that is
            null, 0 or empty;
            ``when`` beside ``of``, a key, ``is``, those of its values for which ``of`` counts, and ``else``
            for any other.
            ``from``: keys that are the source, in place of those that count; ``note``: beside the setting;
            ``by_default``: the keys are the source also where the job gives none.
    """
    if isinstance(line, str):
        return Said(account.known(line)) if line.startswith("$") else said(account, *line.split())
    if not isinstance(line, Mapping):
        line = next(each for each in line if holds(account, each.get("if", "")))
    for word in functions or {}:
        if word in line:
            return (functions or {})[word](account, line)
    value, names = _value_of(account, line)
    if "from" in line:
        names = names_of(account, line["from"])
    if not line.get("by_default"):
        names = [name for name in names if account.has(name) or name in account.environment]
    return Said(value, tuple(names), filled(account, line.get("note", "")))


def _value_of(account: Account, line: Rule) -> tuple[Any, Sequence[str]]:
    """The value that a line gives, and the keys from which it comes, whether given or not."""
    if names := line.get("any", "").split():
        return line["then" if any(map(account.value, names)) else "else"], names
    if "of" not in line:
        return line.get("value"), ()
    if line["of"].startswith("$") or line["of"] in account.environment:
        value, first = account.known(line["of"]), line["of"]
    else:
        value, first = account.chosen(*line["of"].split())
    if when := line.get("when", ""):
        counts = account.value(when) in line["is"]
        return (value or line.get("or", value) if counts else line["else"]), (when, first)
    if "or" in line:
        return value or line["or"], (first,)
    if line.get("lower"):
        value = str(value).lower()
    for pattern, becomes in line.get("patterns", {}).items():
        if match := re.fullmatch(pattern, str(value)):
            return match.expand(becomes), (first,)
    words = line.get("words", {})
    known = isinstance(value, str | int | float | None) and value in words
    otherwise = line.get("else", value)
    if isinstance(otherwise, list) and otherwise is not value:
        otherwise = said_of(account, otherwise).value
    return words[value] if known else otherwise, (first,)
