"""The rules of a program's table: each says, perhaps under a condition, what becomes of arguments. And its
lines: each says which arguments give one value, such as the length of a job's sequences.

A *condition* is a text of words that must all hold, or a list of such texts of which one must hold. A word is

``NAME``
    the value of NAME is neither null, false, 0 nor empty;
``NAME?``
    the job, or a variable of the environment, gives NAME;
``NAME=VALUE|VALUE``
    the value of NAME is one of these, spelled as in YAML;
``NAME>NUMBER``, ``NAME<NUMBER``
    the value of NAME is a number above, or below, NUMBER, which may also be another name;
``!WORD``
    the WORD does not hold.

A ``*`` in the NAME of ``NAME?``, or in a VALUE, matches any characters. NAME is an argument, a variable of
the environment, or ``$FACT``, a value that the reader of the job computed (:attr:`Account.facts`).

A *rule* is a mapping with one verb (see :func:`follow`), with the arguments that it concerns as ``keys``, and
perhaps with a condition ``if``; or a mapping of ``if``, and of ``then`` and ``else``, which are rules. Its
``facts``, lines by name, are facts from then on. A rule
with words in ``each`` is followed once for each word, which replaces the rule's ``%``. In texts of a rule
``{NAME}`` is an argument as the job spells it, and ``{NAME=}`` the argument's value.
"""

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
    """A value that a job says, the keys from which the value came, and a note for the setting's comment."""

    value: Any
    names: Sequence[str] = ()
    note: str = ""


#: functions that read lines, by the word of such a line; a function may return a mapping of several fields
Functions = Mapping[str, Callable[[Account, Rule], Any]]


def written(value: Any) -> str:
    """The text by which the conditions of rules spell a value."""
    return value if isinstance(value, str) else shown(value, sys.maxsize)


def holds(account: Account, condition: Condition) -> bool:
    """Whether a condition holds in a job; an empty condition always does."""
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
        value, number = account.known(name), float(text) if text[:1].isdecimal() else account.known(text)
        are_numbers = isinstance(value, int | float) and isinstance(number, int | float)
        result = are_numbers and (value > number if sign == ">" else value < number)
    return bool(result) != bool(negated)


def follow(account: Account, rules: Sequence[Rule]) -> None:
    """Follow rules in their order. The verb of a rule is the name of a method of :class:`Account`;
    ``problem`` or ``remark``, with a text; ``set``, with the path of a setting and a line (:func:`said_of`);
    ``add``, like ``set``, with a ``source`` or with ``keys``, whose outcome stays open; ``flag``, with an
    argument, a line (without one the argument is a switch) and the ``setting`` that asks for the argument;
    or ``call``, with a name (:func:`call`)."""
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
    for name, line in rule.get("facts", {}).items():
        account.facts[name] = said_of(account, line).value
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
    """The names of arguments that words list: NAME; a pattern with ``*``; ``NAME|NAME``, of which the first
    that the job gives counts; or ``$FACT``, a fact whose value is names."""
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
    """A rule's text, in which ``{NAME}`` becomes the job's argument NAME, and ``{NAME=}`` only its value."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("$"):
            return written(account.known(name))
        if match[2]:
            return shown(account.known(name))
        return account.spelled(name) if name in account.given or name in account.environment else name

    return _NAMED.sub(value, text)


def said(account: Account, *names: str, note: str = "") -> Said:
    """The value of the first of these keys that the job gives other than null or "auto", with that key; else
    the default of the last key."""
    value, first = account.chosen(*names)
    return Said(value, account.given_of(first), note)


def said_of(account: Account, line: Any, functions: Functions | None = None) -> Any:
    """The value that a job says, such as the length of its sequences, by a line of its program's table.

    Args:
        line: keys of a job, of which the first that the job gives counts, or ``$FACT``; a list of lines, of
            which the first whose ``if`` holds counts; or a mapping with one of:
            a word of ``functions``, whose function reads the line;
            ``value``, the value of all jobs;
            ``any``, keys: the value is ``then`` if one of the keys is true, and ``else`` otherwise;
            ``of``, keys, whose value (``lower``: in small letters) is looked up in ``words`` and then in
            ``patterns``, regular expressions with their replacements; ``else`` is the value, or a list of
            lines, for any other (without ``else`` the keys' value stays); ``or`` replaces a value that is
            null, 0 or empty; and ``of`` counts only if the key ``when`` has one of the values ``is``.
            With each: ``from``, keys that are named as the source; ``note``, for the setting's comment;
            ``by_default``: keys are named as the source although the job does not give them.
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
    """The value that a line gives, and the keys from which the value comes, also those the job lacks."""
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
            text = match.expand(becomes)
            return int(text) if text.isdecimal() else text, (first,)
    words = line.get("words", {})
    known = isinstance(value, str | int | float | None) and value in words
    otherwise = line.get("else", value)
    if isinstance(otherwise, list) and otherwise is not value:
        otherwise = said_of(account, otherwise).value
    return words[value] if known else otherwise, (first,)
