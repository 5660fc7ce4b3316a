"""The server of `spbench mcp`: tools whose arguments are the options of commands, and whose answers are what
these print as JSON.

A tool runs its command in a process of its own, so that its answer is the command's, whatever else this
process does. The options that write files, or that use other machines, are no arguments of a tool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import click

from spbench.bench.command_line.cli import COMMANDS
from spbench.bench.errors import UserError, shown, suggestion
from spbench.impls.discovery import installed_version

#: options that write, that use other machines, or that say how much a terminal shows
_LEFT_OUT = {"figure", "snapshot", "output", "executor", "form", "wide", "details", "jobs", "explain"}


@dataclass(frozen=True)
class CommandTool:
    """A command as a tool.

    Attributes:
        fixed: words that follow the command's name in each call.
    """

    name: str
    command: str
    fixed: Sequence[str] = ()

    @property
    def parameters(self) -> Mapping[str, click.Parameter]:
        """The options and arguments that a call may give, by the names of a tool's arguments."""
        return {
            _argument(each): each
            for each in COMMANDS.load(self.command).params  # type: ignore[attr-defined]
            if each.expose_value and each.name not in _LEFT_OUT
        }

    @property
    def description(self) -> str:
        """The command's help."""
        text: str = COMMANDS.load(self.command).help or ""  # type: ignore[attr-defined]
        return "\n".join(line.strip() for line in text.splitlines()).strip()

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the tool's arguments."""
        properties = {name: _schema_of(each) for name, each in self.parameters.items()}
        required = [name for name, each in self.parameters.items() if each.required]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def command_line(self, arguments: Mapping[str, Any]) -> list[str]:
        """The words of the command for a call.

        Raises:
            UserError: an argument that the tool does not have.
        """
        known, words, placed = self.parameters, [self.command, *self.fixed], []
        for name, value in arguments.items():
            if name not in known:
                raise UserError(f"{self.name} has no argument {shown(name)}{suggestion(name, known)}")
            if isinstance(known[name], click.Argument):
                placed += [str(each) for each in _several(value)]
            else:
                words += _option(known[name], value)
        return [*words, "--format", "json", "--quiet", "--", *placed]


TOOLS = {
    tool.name: tool
    for tool in (
        CommandTool("fit", "fit"),
        CommandTool("advise", "advise"),
        CommandTool("list", "list"),
        CommandTool("explain", "import", ("--explain",)),
    )
}


def _argument(parameter: click.Parameter) -> str:
    """What a tool calls a parameter: an option's own name, `--seq-len` as seq_len."""
    if isinstance(parameter, click.Argument):
        return parameter.name or ""
    return max(parameter.opts, key=len).lstrip("-").replace("-", "_")


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


@dataclass(frozen=True)
class ToolAnswer:
    """What a command printed.

    Attributes:
        text: its JSON, or where it failed what it said.
        content: the JSON, a list as the field ``result`` of an object, which all clients take; None: it
            failed.
    """

    text: str
    content: dict[str, Any] | None


async def answer(name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
    """Run the command of a tool. Exit code 1 is an answer, as of a job that does not fit."""
    if name not in TOOLS:
        return ToolAnswer(f"there is no tool {shown(name)}{suggestion(name, TOOLS)}", None)
    try:
        words = TOOLS[name].command_line(arguments)
    except UserError as error:
        return ToolAnswer(str(error), None)
    run = [sys.executable, "-m", "spbench", *words]
    done = await anyio.run_process(run, check=False, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        return ToolAnswer(done.stderr.decode(errors="replace").strip(), None)
    text = done.stdout.decode()
    content = json.loads(text)
    return ToolAnswer(text, content if isinstance(content, dict) else {"result": content})


def server() -> Any:
    """The server of the SDK.

    Raises:
        UserError: the SDK is not installed.
    """
    try:
        import mcp_types as types
        from mcp.server import Server
    except ImportError as error:
        raise UserError("spbench mcp needs the SDK: pip install 'spbench[mcp]'") from error

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
        result = await answer(params.name, params.arguments or {})
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=result.text)],
            structured_content=result.content,
            is_error=result.content is None,
        )

    return Server(
        "spbench",
        version=installed_version("spbench") or "",
        instructions="Sequence parallelism: whether a training job fits its GPUs (fit), which layout is the "
        "fastest (advise), what there is by name (list), and what a job's arguments mean (explain).",
        on_list_tools=on_list,
        on_call_tool=on_call,
    )


def serve() -> int:
    """Serve until standard input ends; returns the exit code."""
    served = server()
    from mcp.server.stdio import stdio_server

    async def speak() -> None:
        async with stdio_server() as (reads, writes):
            await served.run(reads, writes, served.create_initialization_options())

    anyio.run(speak)
    return 0
