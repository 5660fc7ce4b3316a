"""`spbench mcp`: a session of the SDK's client gets what the commands print."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import jsonschema
import pytest

from scripts.schemas import SCHEMAS
from spbench.bench.tools.run.mcp_server import TOOLS, server
from tests.tools.commands.conftest import Run, command_line

# the SDK is imported where it is used: a second, for the one process of several that runs these tests
if TYPE_CHECKING:
    from mcp.client.client import Client

__all__ = ["command_line"]

Answer = TypeVar("Answer")
FIT: dict[str, Any] = {
    "subject": ["causal-transformer-tiny"],
    "cluster": "dgx-a100",
    "gpus": 2,
    "seq_len": "1K",
    "set": ["training.backend=zero3"],
}
ADVISE: dict[str, Any] = {
    "model": ["causal-transformer-tiny"],
    "cluster": "dgx-a100",
    "gpus": "2",
    "seq_len": "1K",
    "batch": 2,
    "only": ["ulysses"],
}


def asked(ask: Callable[[Client], Awaitable[Answer]]) -> Answer:
    """The outcome of a client in a session with the server, both in this process."""
    from mcp.client.client import Client

    async def session() -> Answer:
        async with Client(server()) as client:
            return await ask(client)

    return anyio.run(session)


def test_the_tools_only_read_and_take_the_options_of_their_commands() -> None:
    tools = asked(lambda client: client.list_tools()).tools
    assert {tool.name for tool in tools} == {"fit", "advise", "list", "explain"}
    assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
    schemas = {tool.name: tool.input_schema for tool in tools}
    assert {"subject", "cluster", "seq_len", "budget"} <= schemas["fit"]["properties"].keys()
    assert schemas["fit"]["required"] == ["subject"]
    for schema in schemas.values():
        assert not {"figure", "snapshot", "output", "executor"} & schema["properties"].keys()


def test_a_call_is_the_line_of_its_command() -> None:
    words = TOOLS["fit"].command_line({**FIT, "suggest": True, "longest": False})
    assert words == [
        *("fit", "--cluster=dgx-a100", "--gpus=2", "--seq-len=1K", "--set=training.backend=zero3"),
        *("--suggest", "--format", "json", "--quiet"),
        *("--", "causal-transformer-tiny"),
    ]
    assert TOOLS["explain"].command_line({"words": ["job.sh"]})[:2] == ["import", "--explain"]


def test_a_mistake_is_the_line_of_the_command() -> None:
    unknown = asked(lambda client: client.call_tool("fit", {"sujet": []}))
    assert unknown.is_error
    assert "fit has no argument 'sujet'; did you mean 'subject'?" in unknown.content[0].text  # type: ignore[union-attr]


def test_a_session_lists_what_the_command_lists(command_line: Run) -> None:
    found = asked(lambda client: client.call_tool("list", {"kind": "forms"}))
    assert found.structured_content == json.loads(command_line("list", "forms", "--format", "json")[1])


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "arguments"), [("fit", FIT), ("advise", ADVISE)])
def test_a_session_gets_the_same_json_as_the_command(
    command_line: Run, tool: str, arguments: dict[str, Any]
) -> None:
    """The server is a process of its own, as an agent starts it."""
    from mcp import StdioServerParameters
    from mcp.client.client import Client
    from mcp.client.stdio import stdio_client

    started = StdioServerParameters(command=sys.executable, args=["-m", "spbench", "mcp"])

    async def session() -> Any:
        assert sys.__stderr__ is not None  # that of pytest is no file
        async with Client(stdio_client(started, sys.__stderr__)) as client:
            return await client.call_tool(tool, arguments)

    found = anyio.run(session)
    assert not found.is_error
    code, out, _ = command_line(*TOOLS[tool].command_line(arguments))
    assert code == 0
    text = found.content[0].text
    assert _without_seconds(json.loads(text)) == _without_seconds(json.loads(out))
    assert found.structured_content in (json.loads(text), {"result": json.loads(text)})
    jsonschema.validate(json.loads(text), SCHEMAS[f"{tool}.json"]())


def _without_seconds(content: Any) -> Any:
    """What the search itself took is not the answer's."""
    if isinstance(content, list):
        return [_without_seconds(each) for each in content]
    return {name: value for name, value in content.items() if name not in ("seconds", "cpu_s")}
