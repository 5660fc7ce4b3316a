"""A cell as an `accelerate launch` of a script whose arguments are the Trainer's."""

from spbench.bench.cell import Cell
from spbench.bench.setting_values import CONFIG
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import argument_table, table_content
from spbench.bench.tools.jobs.flags import Flag, Flags, facts_of, several_ranks
from spbench.bench.tools.jobs.job import TABLES
from spbench.bench.tools.jobs.rules import follow
from spbench.impls import model_preset


def flags(cell: Cell) -> Flags:
    """The command that runs the cell, to be read back; none without the model's name on Hugging Face."""
    table = argument_table("deepspeed")
    program = f"accelerate{table.program.rpartition('accelerate')[2]}, transformers 5"
    if "/" not in cell.model or cell.model.endswith(CONFIG):
        missing = f"model {cell.model} without its name on Hugging Face, as Qwen/Qwen3-8B"
        return Flags(program, "train.sh", (), "", (missing,))
    world, (_, mesh) = cell.sizes.world, several_ranks(cell)
    facts = {**facts_of(cell, model_preset(*cell.model_arguments)), "world": world}
    account = Account(table=table, given={}, facts={**facts, "is_shared": world > mesh.get("dp", 1)})
    follow(account, table_content("accelerate")["flags"])
    lines = [Flag(name, str(value), setting) for name, value, setting in account.flags if setting]
    text = TABLES.document("accelerate script", program=program, flags=account.flags)
    return Flags(program, "train.sh", tuple(lines), text)
