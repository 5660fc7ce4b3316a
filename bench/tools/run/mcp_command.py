"""`spbench mcp`: commands that only read, offered to agents by the Model Context Protocol."""

from __future__ import annotations

import click

from spbench.bench.command_line.options import body


@click.command("mcp")
@body("run.mcp_server:serve")
def command() -> None:
    """Answer over MCP: fit, advise, list and explain as tools.

    An agent starts it and speaks with it by its standard input and output (the Model Context Protocol,
    transport stdio). Each tool runs the command of its name (explain: import --explain) with --format json,
    and returns what that prints; options that write files are left out. Needs the extra 'mcp'.
    """
