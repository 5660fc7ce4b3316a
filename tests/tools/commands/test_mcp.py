"""`spbench mcp`: a session of the SDK's client gets what the commands print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import jsonschema
import pytest

from scripts.schemas import SCHEMAS
from spbench.bench.errors import UserError
from spbench.bench.files import read_file
from spbench.bench.measure.scenarios.choices import cell_names
from spbench.bench.tools.run import mcp_server
from spbench.bench.tools.run.mcp_server import MOST, TOOLS, Calls, ToolError, part_of, server, short_answer
from spbench.impls.loose_files import ONLY_DATA
from tests.grid import data
from tests.tools.commands.conftest import Run, command_line

# the SDK is imported where it is used: a second, for the one process of several that runs these tests
if TYPE_CHECKING:
    from mcp.client.client import Client

__all__ = ["command_line"]

Answer = TypeVar("Answer")
FIT: dict[str, Any] = data(__file__)["FIT"]
ADVISE: dict[str, Any] = data(__file__)["ADVISE"]


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
    _, out, _ = command_line("list", "forms", "--format", "json")
    assert json.loads(found.content[0].text) == json.loads(out)  # type: ignore[union-attr]


def test_a_long_answer_is_cut_and_each_of_its_parts_can_be_asked_for() -> None:
    refused = {f"ulysses sp{n}": f"{n % 3} heads / cannot be split" for n in range(1150)}
    content = [{"why": "a tie", "layouts": [{"step_s": 1 / 3, "about": "x" * 900}] * 40, "refused": refused}]
    text = short_answer(content)
    assert len(text) <= MOST
    cut, *left = text.splitlines()
    assert json.loads(cut)[0]["why"] == "a tie"
    assert json.loads(cut)[0]["layouts"][0]["step_s"] == 0.333333
    assert any("/0/refused: " in line and "384 x 0 heads / cannot be split" in line for line in left)
    pages: dict[str, str] = {}
    while len(pages) < len(refused):
        page = short_answer(part_of(content, "/0/refused", len(pages)), "/0/refused", len(pages))
        assert len(page) <= MOST
        pages |= json.loads(page.splitlines()[0])
    assert pages == refused
    assert json.loads(short_answer(part_of(content, "/0/layouts/39/about", 0))) == "x" * 900
    with pytest.raises(UserError, match="no part '/0/refusd'; did you mean 'refused'"):
        part_of(content, "/0/refusd", 0)


#: in the place of Python: prints what it was given, and how many of it run at once
_PROGRAM = data(__file__)["_PROGRAM"]


def test_calls_run_few_at_a_time_for_a_limited_time_and_no_code_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mcp_server.sys, "executable", str(program))
    answers = []

    async def ask(calls: Calls) -> None:
        answers.append(json.loads(await calls.answer("list", {"kind": "figures"})))

    async def at_once(calls: Calls) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(ask, calls)

    anyio.run(at_once, Calls())
    assert len(answers) == 4
    assert max(each["runs"] for each in answers) == 2
    assert all(each["data"] == "1" and "program() list " in each["words"] for each in answers)
    with pytest.raises(ToolError, match="list had no answer after 0 s and was ended"):
        anyio.run(Calls(limit_s=0.01).answer, "list", {})


def test_for_an_agent_files_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY_DATA, "1")
    model, pipe = tmp_path / "model.py", tmp_path / "pipe"
    model.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nPRESETS = {{}}")
    with pytest.raises(UserError, match=r"model\.py: .*no code of files is run here"):
        cell_names("model", str(model))
    assert not (tmp_path / "ran").exists()
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="it is no regular file"):
        read_file(pipe)


@pytest.mark.slow
def test_a_command_ends_with_the_server_that_was_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # which the command would read for ever
    program = f"from {mcp_server.__name__} import program; program()"
    command = [sys.executable, "-c", program, "import", "--explain", str(tmp_path / "pipe")]
    start = f"import subprocess, time; print(subprocess.Popen({command}).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    with (tmp_path / "pipe").open("w"):  # the command reads
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split():
                return
            time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the command outlived the server")


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
    text, whole = found.content[0].text, json.loads(out)
    jsonschema.validate(whole, SCHEMAS[f"{tool}.json"]())
    expected = short_answer(whole)
    assert _without_seconds(json.loads(text.splitlines()[0])) == _without_seconds(
        json.loads(expected.splitlines()[0])
    )
    assert len(text) <= MOST


def _without_seconds(content: Any) -> Any:
    """What the search itself took is not the answer's."""
    if isinstance(content, list):
        return [_without_seconds(each) for each in content]
    return {name: value for name, value in content.items() if name not in ("seconds", "cpu_s")}
