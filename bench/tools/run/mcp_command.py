"""`spbench mcp`: commands that only read, offered to agents by the Model Context Protocol."""

import click

from spbench.bench.command_line.options import body


@click.command("mcp")
@body("run.mcp_server:serve")
def command() -> None:
    """Answer over MCP: fit, advise, list and explain as tools.

    An agent starts this server and speaks with it by standard input and output (the Model Context Protocol,
    transport stdio). Each tool runs the command of its name (explain: import --explain) with --format json,
    and returns the output. Tools have no options that write files. Needs the extra 'mcp'.
    """
