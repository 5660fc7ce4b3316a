"""The commands of a shell script, found without running the script: variables, arrays, arithmetic and their
conditions are evaluated on the syntax tree of tree-sitter-bash.

A value that only a run could tell (the output of ``$(...)``, a variable that is set elsewhere) becomes a mark
in a word; :func:`unknown_in` returns the source text that a mark replaces.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tree_sitter import Node

from spbench.bench.tools.jobs.shell_syntax import (
    EXPANDED,
    NotKnown,
    ShellError,
    below,
    computed,
    holds,
    mark,
    number,
    printed,
    source_of,
    syntax_tree,
    unescaped,
    unknown_in,
)

#: the most characters of an expanded word
_MOST_CHARACTERS = 10**6
#: ${NAME}, ${NAME[@]}, ${NAME:-TEXT} and such
_PARAMETER = re.compile(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
#: commands whose here-document is a script
_SHELLS = {"bash", "sh", "sbatch", "srun", "zsh"}


@dataclass(frozen=True)
class Command:
    """A command of a script.

    Attributes:
        words: the command's words after expansion.
        environment: the variables that are exported when the command runs.
        branch: whether the command is under an unknown condition, in a loop or in a function.
    """

    line: int
    words: list[str]
    environment: Mapping[str, str]
    branch: bool


@dataclass
class Shell:
    """The state of a shell while a script is read.

    Attributes:
        variables: by name, a text, or a list of the elements of an array.
        commands: the commands of the script so far, in order.
    """

    variables: dict[str, str | list[str]]
    exported: set[str] = field(default_factory=set)
    commands: list[Command] = field(default_factory=list)
    _branch: bool = False
    _above: int = 0

    def __post_init__(self) -> None:
        # these values replace values that the script sets, and elements that it adds under a condition
        self.given = {name: value for name, value in self.variables.items() if isinstance(value, str)}

    def read(self, text: str, above: int = 0) -> None:
        """Read a script that has ``above`` lines before it in its file. ShellError if it is no script."""
        before, self._above = self._above, above
        self._run_all(syntax_tree(text, above).named_children)
        self._above = before

    def _line(self, node: Node) -> int:
        return self._above + int(node.start_point[0]) + 1

    def expand_text(self, text: str) -> str:
        """A text after the expansion of its variables, without its quotes."""
        plain = text.replace('"', "").replace("'", "")
        words = syntax_tree(f'echo "{plain}"').named_children[0].named_children
        return " ".join(self.expand(words[1]))

    def _run_all(self, nodes: Sequence[Node], branch: bool = False) -> bool | None:
        """Read statements, which only may run if ``branch``. Returns whether the last statement succeeds;
        None: unknown."""
        with self._under_condition(branch):
            return [None, *map(self._run, nodes)][-1]

    @contextmanager
    def _under_condition(self, branch: bool) -> Iterator[None]:
        before = self._branch
        self._branch = before or branch
        try:
            yield
        finally:
            self._branch = before

    def _run(self, node: Node) -> bool | None:
        """Read a statement: note its commands, do its assignments. Returns whether the statement succeeds;
        None: unknown."""
        children = node.named_children
        match node.type:
            case "command":
                return self._command(node)
            case "variable_assignment":
                return self._assign(node)
            case "declaration_command":
                exports = node.children[0].type == "export"
                for each in children:
                    if is_set := each.type == "variable_assignment":
                        self._assign(each)
                    if exports:
                        self.exported.add(source_of(each.named_children[0] if is_set else each))
                return True
            case "redirected_statement":
                return self._redirected(node)
            case "negated_command":
                status = self._run(children[-1])
                return None if status is None else not status
            case "test_command" | "compound_statement" if (sign := node.children[0].type) != "{":
                evaluated = number if sign == "((" else holds
                words = Shell({**dict.fromkeys("123456789", ""), **self.variables})  # the script has none
                try:
                    return bool(evaluated(children[0], words._joined))
                except (NotKnown, ValueError, ArithmeticError, IndexError):
                    return None
            case "variable_assignments" | "compound_statement" | "pipeline":
                return self._run_all(children)
            case "list":
                status = self._run(children[0])
                if status is (node.children[1].type == "||"):
                    return status
                last = self._run_all(children[1:], branch=status is None)
                return None if status is None else last
            case "if_statement":
                self._if(node)
                return None
            case "case_statement":
                self._case(*children)
                return None
            case "subshell":
                before = dict(self.variables)
                status = self._run_all(children)
                self.variables = before
                return status
            case "while_statement" if self._run(children[0]) is False:
                return True
            case "for_statement" if variable := node.child_by_field_name("variable"):
                self.variables[source_of(variable)] = mark(f"${source_of(variable)}, of a loop")
        self._run_all(children, branch=True)
        return None

    def _if(self, node: Node) -> None:
        """Read the branch of an `if` that runs, or all branches that may run if a condition is unknown."""
        certain = True  # no clause above may have been taken
        for clause in (node, *(each for each in node.named_children if each.type.endswith("_clause"))):
            body = [each for each in clause.named_children if not each.type.endswith("_clause")]
            status: bool | None = True
            if clause.type != "else_clause":
                status = self._run_all([body.pop(0)], branch=not certain)
            if status is not False:
                self._run_all(body, branch=status is None or not certain)
            if status and certain:
                return
            certain = certain and status is False

    def _case(self, value: Node, *items: Node) -> None:
        """Read the item of a `case` that runs, or all items that may run if the value is unknown."""
        word = self._joined(value)
        known = not unknown_in(word)
        for item in items:
            patterns = item.children_by_field_name("value")
            texts = [self._joined(each) for each in patterns]
            body = [each for each in item.named_children if each not in patterns]
            if known and ("*" in texts or word in texts):
                self._run_all(body)
                return
            if not known or any(re.search(r"[*?[]", text) or unknown_in(text) for text in texts):
                known = False
                self._run_all(body, branch=True)

    def _redirected(self, node: Node) -> bool | None:
        """Read a statement with redirections, to whose nodes the grammar also gives the words behind them.
        Returns whether the statement succeeds; None: unknown."""
        body, redirects = node.child_by_field_name("body"), node.children_by_field_name("redirect")
        if body is None:
            return None
        more = [word for each in redirects for word in each.children_by_field_name("destination")[1:]]
        status = self._command(body, more) if body.type == "command" else self._run(body)
        is_script = bool(self.commands) and self.commands[-1].words[0] in _SHELLS
        for redirect in redirects:
            quoted = any(source_of(c)[:1] in "'\"\\" for c in redirect.children if c.type == "heredoc_start")
            for each in redirect.named_children if redirect.type == "heredoc_redirect" else ():
                if each.type == "heredoc_body" and (words := source_of(body).split())[0] == "read":
                    self.variables[words[-1]] = self._text(each).replace("\\\n", " ")
                elif each.type == "heredoc_body" and is_script:
                    self.read(source_of(each) if quoted else self._text(each), self._line(each) - 1)
                elif each.type in ("pipeline", "command", "list"):
                    self._run(each)
        return status

    def _command(self, node: Node, more: Sequence[Node] = ()) -> bool | None:
        own: dict[str, str] = {}
        words, before = [*node.named_children, *more], dict(self.variables)
        while words and words[0].type == "variable_assignment":
            assignment = words.pop(0)
            self._assign(assignment)
            name = source_of(assignment.named_children[0])
            value = self.variables[name]
            own[name] = value if isinstance(value, str) else " ".join(value)
            after = (node.text or b"")[assignment.end_byte - node.start_byte :]
            # the grammar joins NAME=VALUE and the line below
            if re.match(rb"(?:[ \t]|\\\n)*(#[^\n]*)?\n", after):
                own, before = {}, dict(self.variables)
        self.variables = before
        expanded = [text for word in words for text in self.expand(word)]
        if not expanded:
            return None
        environment = {n: v for n in sorted(self.exported) if isinstance(v := before.get(n), str)}
        line = self._line(words[0])
        self.commands.append(Command(line, expanded, {**environment, **own}, self._branch))
        return {"true": True, ":": True, "false": False}.get(expanded[0])

    def _assign(self, node: Node) -> bool:
        name, content = source_of(node.named_children[0]), node.child_by_field_name("value")
        before = self.variables.get(name, "")
        array = content is not None and content.type == "array"
        value: str | list[str] = "" if content is None else self._joined(content)
        if content is not None and array:
            value = [text for each in content.named_children for text in self.expand(each)]
        if name in self.given and not array:
            self.variables[name] = self.given[name]
            return True
        if self._branch and name in self.given:
            value = self.given[name].split()
        elif self._branch:
            words = value if isinstance(value, list) else ()
            unknown = mark(f"${name}, which line {self._line(node)} sets under a condition", words)
            value = [unknown] if array else unknown
        if any(child.type == "+=" for child in node.children):
            if isinstance(before, str) and isinstance(value, str):
                value = before + value
            else:
                old = before if isinstance(before, list) else [before] * bool(before)
                value = [*old, *(value if isinstance(value, list) else [value])]
        self.variables[name] = value
        return self._short_enough(node, "".join(value)) is not None

    def expand(self, node: Node) -> list[str]:
        """The words that a word of the script becomes by expansion: one, several, or none."""
        fields: list[str] = []
        current: str | None = None
        for part in node.children if node.type == "concatenation" else [node] * (node.type != "comment"):
            pieces = self._values(part)
            # split at spaces, of which one at an end parts it from its neighbours
            if "expansion" in part.type:
                joined = " ".join(pieces)
                pieces = joined.split()
                if current is not None and joined[:1].isspace():
                    fields.append(current)
                    current = None
            if pieces:
                first, *others = pieces
                fields += [(current or "") + first, *others]
                current = fields.pop()
        return fields if current is None else [*fields, current]

    def _joined(self, node: Node) -> str:
        """The text that a word of the script becomes by expansion, if spaces do not split it."""
        parts = node.children if node.type == "concatenation" else [node]
        return "".join(" ".join(self._values(part)) for part in parts)

    def _values(self, node: Node) -> list[str]:
        """The values of a part of a word: one text, or the elements of an array."""
        text = source_of(node).lstrip()  # the parser takes spaces before an expansion in a string to it
        match node.type:
            case "string":  # "${NAME[@]}" is as many words as it has elements
                only = node.named_children[0] if node.named_child_count == 1 else None
                if only and len(source_of(only)) + 2 == len(text) and "expansion" in only.type:
                    return self._values(only)
                return [self._text(node, 1)]
            case "raw_string":
                return [text[1:-1]]
            case "command_substitution":
                return [printed(node, text.removeprefix("$(").strip("`)").strip(), self.expand)]
            case "ansi_c_string" | "translated_string" | "process_substitution":
                return [mark(text)]
            case "arithmetic_expansion":
                return [computed(node, self._joined)]
            case "variable_name":
                return self._parameter(node, text)
            case "simple_expansion":
                return self._parameter(node, text[1:])
            case "expansion":
                return self._parameter(node, text[2:-1])
        return [re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""), flags=re.DOTALL)]

    def _parameter(self, node: Node, text: str) -> list[str]:
        """The values of ``$TEXT`` or ``${TEXT}``: one text, or the elements of an array."""
        if text == "#":
            return [str(sum(n.isdecimal() and n != "0" and t != "" for n, t in self.variables.items()))]
        parts = _PARAMETER.fullmatch(text)
        if parts is None:
            return [mark(source_of(node))]
        name, index, how, otherwise = parts.groups()
        if name in ("@", "*"):
            return []  # the script is read as one without arguments
        value = self.variables.get(name)
        elements = value if isinstance(value, list) else None if value is None else [value]
        there = elements is not None and (elements != [""] or not (how or "").startswith(":"))
        if how and (how[-1] == "+" or (how[-1] in "-=" and not there)):
            at = len(source_of(node).encode()) - len(otherwise.encode()) - 1
            return [self._text(node, at)] if there or how[-1] != "+" else []
        if elements is None:
            return [mark(f"${name}")]
        return elements if index or not isinstance(value, list) else elements[:1]

    def _text(self, node: Node, skipped: int = 0) -> str:
        """The expanded text of a string, of a here-document or of the rest of ``${NAME:-...}``, without the
        first ``skipped`` bytes of the node and, if ``skipped`` is not 0, without its last byte."""
        text, start, at = node.text or b"", node.start_byte, skipped
        joined = ""
        for child in below(node, EXPANDED):
            if child.start_byte - start >= at and child != node:
                space = " " * source_of(child)[:1].isspace()
                joined += (
                    unescaped(text[at : child.start_byte - start]) + space + " ".join(self._values(child))
                )
                at = child.end_byte - start
        return self._short_enough(node, joined + unescaped(text[at : len(text) - bool(skipped)]))

    def _short_enough(self, node: Node, text: str) -> str:
        if len(text) > _MOST_CHARACTERS:
            problem = f"a word becomes longer than {_MOST_CHARACTERS} characters"
            raise ShellError(self._line(node), problem)
        return text
