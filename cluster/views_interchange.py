"""What `moetis import` read, as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


def import_table(found: dict[str, Any]) -> Table:
    """One row a fact."""
    table = Table(title=Text(f"{found['source']} -> {found['out']}"), title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    layers = found["layers"]
    rows = {
        "format": found["format"],
        "read": f"{found['files']} files, {found['bytes_read'] / 1e6:,.1f} MB",
        "written": f"{found['files_written']} files, {found['bytes_written'] / 1e6:,.1f} MB of {found['holds']}",
        "experts a layer": str(found["experts"]),
        "MoE layers": "unknown" if layers is None else f"{len(layers['moe'])} of {layers['hidden']}",
    }
    if found["holds"] == "tokens":
        rows["top k"] = str(found["top_k"])
        rows["tokens"] = f"{found['tokens_kept']:,} of {found['tokens_seen']:,}"
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return table
