"""The server of `spbench mcp`. A tool's arguments are the options of a command, and its answer is the JSON
that the command prints, cut by :func:`short_answer`, because a long answer would fill an agent's context.

A tool runs its command in a process of its own (:func:`program`), so that the state of the server's process
cannot change the answer. The command's process reads files only as data, and ends with the server. Options
that write files, or that use other machines, are no arguments of a tool.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import click

from spbench.bench.command_line.cli import COMMANDS, main
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.measure import when_parent_is_gone
from spbench.impls import ONLY_DATA, installed_version

#: the options that write files, use other machines, or say how much a terminal shows
_LEFT_OUT = {"figure", "snapshot", "output", "executor", "form", "wide", "details", "jobs", "explain"}
#: how many commands run at once, and how many answers are kept for calls that ask for a further part
_AT_ONCE, _KEPT = 2, 8
#: the seconds that a command may take, because some searches for a layout take several minutes
LIMIT_S = 900.0


@dataclass(frozen=True)
class CommandTool:
    """A command of spbench as a tool of the server.

    Attributes:
        fixed: words that follow the command's name in each call.
    """

    name: str
    command: str
    fixed: Sequence[str] = ()

    @property
    def parameters(self) -> Mapping[str, click.Parameter]:
        """The options and arguments that a call may give, by the names that the tool has for them."""
        return {
            max(each.opts, key=len).lstrip("-").replace("-", "_"): each
            for each in COMMANDS.load(self.command).params  # type: ignore[attr-defined]
            if each.expose_value and each.name not in _LEFT_OUT
        }

    @property
    def description(self) -> str:
        """The help text of the command."""
        text: str = COMMANDS.load(self.command).help or ""  # type: ignore[attr-defined]
        return "\n".join(line.strip() for line in text.splitlines()).strip()

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the tool's arguments."""
        properties = {name: _schema_of(each) for name, each in self.parameters.items()}
        required = [name for name, each in self.parameters.items() if each.required]
        return {
            "type": "object",
            "properties": properties | FURTHER,
            "required": required,
            "additionalProperties": False,
        }

    def command_line(self, arguments: Mapping[str, Any]) -> list[str]:
        """The words of the command line that answers a call with these arguments.

        Raises:
            UserError: the tool does not have one of the arguments.
        """
        parameters, words, positional = self.parameters, [self.command, *self.fixed], []
        for name, value in arguments.items():
            if name not in parameters:
                raise UserError(f"{self.name} has no argument {shown(name)}{suggestion(name, parameters)}")
            if isinstance(parameters[name], click.Argument):
                positional += [str(each) for each in _several(value)]
            else:
                words += _option(parameters[name], value)
        return [*words, "--format", "json", "--quiet", "--", *positional]


TOOLS = {name: CommandTool(name, name) for name in ("fit", "advise", "list")}
TOOLS["explain"] = CommandTool("explain", "import", ("--explain",))


def _schema_of(parameter: click.Parameter) -> dict[str, Any]:
    kind = parameter.type
    one: dict[str, Any] = {"type": "string"}
    if isinstance(parameter, click.Option) and parameter.is_flag:
        one = {"type": "boolean"}
    elif isinstance(kind, click.types.IntParamType):
        one = {"type": "integer", "minimum": 1}
    elif isinstance(kind, click.Choice):
        one = {"enum": [*kind.choices]}
    elif kind.name == "n":  # sizes such as 128K
        one = {"type": ["integer", "string"]}
    several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    schema = {"type": "array", "items": one} if several else one
    text = getattr(parameter, "help", None) or parameter.metavar
    return {**schema, "description": text} if text else schema


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _option(parameter: click.Parameter, value: Any) -> Iterator[str]:
    flag = max(parameter.opts, key=len)
    for each in _several(value):
        if each is True:
            yield flag
        elif each is not False and each is not None:
            yield f"{flag}={each}"


class ToolError(Exception):
    """A wrong call, or the failure of a call's command; the message is one line."""


@dataclass
class Calls:
    """Runs the commands of calls, at most two at a time, so that further calls wait.

    Attributes:
        kept: the last answers, by the words of their command lines.
    """

    limit_s: float = LIMIT_S
    kept: dict[tuple[str, ...], Any] = field(default_factory=dict)
    turns: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(_AT_ONCE))

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The answer of a tool's command, or a part of it, which needs no further run if the answer was kept.

        Raises:
            ToolError: the call or its command failed.
        """
        if name not in TOOLS:
            raise ToolError(f"there is no tool {shown(name)}{suggestion(name, TOOLS)}")
        part, start = arguments.get("part", ""), arguments.get("start", 0)
        try:
            words = tuple(TOOLS[name].command_line({n: v for n, v in arguments.items() if n not in FURTHER}))
            if not (part or start) or words not in self.kept:
                self.kept.pop(words, None)
                self.kept[words] = await self._printed(name, words)
                while len(self.kept) > _KEPT:
                    del self.kept[next(iter(self.kept))]
            return short_answer(part_of(self.kept[words], part, start), part, start)
        except UserError as error:
            raise ToolError(str(error)) from error

    async def _printed(self, name: str, words: Sequence[str]) -> Any:
        """The JSON that a command prints. Exit code 1 is an answer too, as for a job that does not fit."""
        run = [sys.executable, "-c", _PROGRAM.format(sys.path), *words]
        # PYTHONSAFEPATH: Python does not import modules of the working folder by accident
        data = {ONLY_DATA: "1", "PYTHONSAFEPATH": "1"}
        async with self.turns:
            with anyio.move_on_after(self.limit_s) as limit:
                done = await anyio.run_process(
                    run, check=False, stdin=subprocess.DEVNULL, env={**os.environ, **data}
                )
        if limit.cancelled_caught:
            raise ToolError(
                f"{name} had no answer after {self.limit_s:.0f} s and was ended; ask for less, or run "
                f"'spbench {words[0]}' in a shell, which has no limit"
            )
        if done.returncode not in (0, 1) or not done.stdout:
            raise ToolError(_in_words(done.stderr.decode(errors="replace").strip()))
        return json.loads(done.stdout)


def _in_words(text: str) -> str:
    """The error text of a command, in which a wrong option is named as the tool's argument."""
    text = text.removeprefix("spbench: ")
    if at := re.match(r"Invalid value for '(?:--)?([\w-]+)[^']*': ", text):
        return f"{at[1].replace('-', '_')} {text[at.end() :]}"
    return text


def server() -> Any:
    """The MCP server, an object of the SDK of the Model Context Protocol.

    Raises:
        UserError: the SDK is not installed.
    """
    try:
        import mcp_types as types
        from mcp.server import Server
    except ImportError as error:
        raise UserError("spbench mcp needs the SDK: pip install mcp") from error
    calls = Calls()

    async def on_list(ctx: Any, params: Any) -> Any:
        reads = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.schema(),
                    annotations=reads,
                )
                for tool in TOOLS.values()
            ]
        )

    async def on_call(ctx: Any, params: Any) -> Any:
        try:
            text, is_error = await calls.answer(params.name, params.arguments or {}), False
        except ToolError as error:
            text, is_error = str(error), True
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)

    return Server(
        "spbench",
        version=installed_version("spbench") or "",
        instructions="Sequence parallelism: whether a training job fits its GPUs (fit), which layout is the "
        "fastest (advise), what there is by name (list), and what a job's arguments mean (explain).",
        on_list_tools=on_list,
        on_call_tool=on_call,
    )


def serve() -> int:
    """Serve until standard input ends, and return the exit code."""
    served = server()
    from mcp.server.stdio import stdio_server

    async def speak() -> None:
        async with stdio_server() as (reads, writes):
            await served.run(reads, writes, served.create_initialization_options())

    anyio.run(speak)
    return 0


#: the Python program of a call's process; it imports the same code as the server
_PROGRAM = f"import sys; sys.path[:] = {{}}; from {__name__} import program; program()"


def program() -> None:
    """Run the command `spbench` in the process of a call; the process ends when the server ends."""
    when_parent_is_gone()
    main()


#: the most characters of an answer, including its lines on what was left out
MOST = 6000
#: the JSON schemas of the arguments by which a call asks for more of an answer, by name
FURTHER: dict[str, dict[str, Any]] = {
    "part": {"type": "string", "description": "Of a long answer: a JSON pointer to a part, as /0/layouts."},
    "start": {"type": "integer", "minimum": 0, "description": "Of that part: the first entry to show."},
}
#: the most entries of lists and tables, and characters of texts; the first pair that has room is taken
_CUTS = ((1000, 4000), (100, 1000), (50, 500), (20, 400), (10, 300), (5, 300), (3, 200), (2, 120), (1, 80))
#: how many cuts are named, how many reasons are counted, and the characters of a reason
_MOST_NAMED, _MOST_REASONS, _REASON = 12, 6, 120


def part_of(content: Any, pointer: str, start: int) -> Any:
    """The part of an answer at a JSON pointer, from its entry ``start`` on.

    Raises:
        UserError: the answer has no such part, or ``start`` is not a whole number of at least 0.
    """
    for escaped in str(pointer).split("/")[1:]:
        name, entries = escaped.replace("~1", "/").replace("~0", "~"), _entries(content)
        if name not in entries:
            raise UserError(f"the answer has no part {shown(pointer)}{suggestion(name, entries)}")
        content = entries[name]
    if not isinstance(start, int) or start < 0:
        raise UserError(f"start must be a whole number of at least 0, not {shown(start)}")
    if isinstance(content, dict):
        return dict([*content.items()][start:])
    return content[start:] if isinstance(content, (list, str)) else content


def short_answer(content: Any, pointer: str = "", start: int = 0) -> str:
    """The JSON of an answer or a part in at most :data:`MOST` characters, with lines on omitted parts."""
    for entries, characters in _CUTS:
        cuts: list[str] = []
        shown_part = _cut(content, pointer, start, entries, characters, cuts)
        text = json.dumps(shown_part, ensure_ascii=False, separators=(",", ":"))
        if cuts:
            text += "\nLeft out; ask again with these arguments and part (and start):\n"
            text += "\n".join(cuts[:_MOST_NAMED])
            text += f"\nand of {len(cuts) - _MOST_NAMED} further parts" * (len(cuts) > _MOST_NAMED)
        if len(text) <= MOST:
            return text
    parts = [f"{pointer}/{_escaped(name)}" for name in _entries(content)]
    return f"The answer has no room; ask for a part of it: {' '.join(parts)}"[:MOST]


def _cut(content: Any, at: str, start: int, entries: int, characters: int, cuts: list[str]) -> Any:
    """The value, whose JSON pointer is ``at``, with lists and tables cut to ``entries`` and texts to
    ``characters``; ``cuts`` gets a line for each cut."""
    if isinstance(content, float):
        return float(f"{content:.6g}")
    if isinstance(content, str) and (left := len(content) - characters) > 0:
        cuts.append(f"{at}: {left} characters from {start + characters} on")
        return content[:characters]
    if not isinstance(content, (dict, list)):
        return content
    inner = _entries(content, start)
    is_list = isinstance(content, list) or (len(inner) > 1 and {*map(type, inner.values())} == {str})
    if is_list and (left := len(inner) - entries) > 0:
        cuts.append(f"{at}: {left} entries from {start + entries} on{_reasons(content) * (not start)}")
        inner = dict([*inner.items()][:entries])
    cut = {n: _cut(each, f"{at}/{_escaped(n)}", 0, entries, characters, cuts) for n, each in inner.items()}
    return cut if isinstance(content, dict) else [*cut.values()]


def _reasons(table: Any) -> str:
    """The most frequent texts of a table with their counts; "" if most entries have texts of their own."""
    counts = Counter(table.values()) if isinstance(table, dict) else Counter[str]()
    if not counts or len(counts) > len(table) / 2:
        return ""
    counted = [f"{n} x {text[:_REASON]}" for text, n in counts.most_common(_MOST_REASONS)]
    more = len(counts) - len(counted)
    return f"; in all {'; '.join(counted)}{f'; {more} other texts' if more > 0 else ''}"


def _entries(content: Any, start: int = 0) -> dict[str, Any]:
    """The entries of a table, or of a list whose first entry has the index ``start``, by their names in a
    JSON pointer; {} for any other value."""
    if isinstance(content, list):
        return {str(i): each for i, each in enumerate(content, start)}
    return content if isinstance(content, dict) else {}


def _escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
