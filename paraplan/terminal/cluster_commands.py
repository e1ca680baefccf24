"""`paraplan cluster`: what clusters can be named, what one is, what this machine is, and what a cluster file holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paraplan.ir.errors import ClusterError
from paraplan.ir.process.lazy import lazy
from paraplan.terminal.command_options import AsJson
from paraplan.terminal.output import Progress, out, print_json

app = typer.Typer(help="Describe clusters: the catalog, files, this machine.", no_args_is_help=True)

_PARTS = {
    "parse_cluster": "paraplan.report.cluster_rows",
    "cluster_tables": "paraplan.report.cluster_rows",
    "catalog_rows": "paraplan.report.cluster_rows",
    "show_rate": "paraplan.report.cluster_rows",
    "show_flops": "paraplan.report.cluster_rows",
    "show_bytes": "paraplan.report.units",
    "ClusterSpec": "paraplan.ir.machine.cluster",
    "cluster_yaml": "paraplan.ir.machine.cluster_file",
    "json_schema": "paraplan.ir.schema",
    "to_json": "paraplan.ir.struct",
    "write_bytes": "paraplan.ir.struct",
    "detect": "paraplan.jobs.measuring.detect",
}
_part = lazy(_PARTS)


@app.command("list")
def list_devices(as_json: AsJson = False) -> None:
    """List the catalog's devices."""
    rows = _part("catalog_rows")()
    bytes_text, rate, flops = _part("show_bytes"), _part("show_rate"), _part("show_flops")
    table = _table("device", numbers=("memory", "bandwidth", "fp32", "tf32", "bf16", "fp8", "in node", "between nodes"))
    for row in rows:
        found = [
            flops(row.flops_per_s[dtype], dtype) if dtype in row.flops_per_s else "–"
            for dtype in ("float32", "tf32", "bfloat16", "float8_e4m3fn")
        ]
        table.add_row(
            row.name,
            bytes_text(row.memory_bytes),
            rate(row.memory_bytes_per_s),
            *found,
            rate(row.in_node_bytes_per_s),
            rate(row.between_nodes_bytes_per_s),
        )
    console = out()
    console.print(table)
    console.print(
        "[dim]A cluster is named devices per node x device : nodes, e.g. 8xH100:4; groups are joined with +, e.g. "
        "8xA100-80:2+8xH100:2. Sources: paraplan cluster show 8xH100[/dim]"
    )
    if as_json:
        print_json({"devices": [json.loads(_part("to_json")(row)) for row in rows]})


@app.command()
def show(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A file, a catalog name (8xH100:4), or local:4.")],
    as_json: AsJson = False,
) -> None:
    """Show a cluster: devices, rates, links, and where the numbers come from."""
    spec = _part("parse_cluster")(cluster)
    _show(out(), spec)
    if as_json:
        print_json(json.loads(_part("to_json")(spec)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of cluster files."""
    sys.stdout.write(json.dumps(_part("json_schema")(_part("ClusterSpec")), indent=2) + "\n")


@app.command()
def detect(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the cluster file.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="CPU processes, where there is no GPU (default: one per core).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe this machine as a cluster file."""
    if output is not None and output.suffix not in (".yaml", ".yml", ".json"):
        raise ClusterError(f"--output {str(output)!r}: a cluster file ends in .yaml, .yml or .json")
    with Progress() as tell:
        tell("looking at this machine")
        spec = _part("detect")(processes)
    console = out()
    _show(console, spec)
    if output is not None:
        made = "Written by paraplan cluster detect; paraplan cluster schema says what each field means."
        data = _part("to_json")(spec) if output.suffix == ".json" else _part("cluster_yaml")(spec, made).encode()
        _part("write_bytes")(output, data, "--output", ClusterError)
    console.print(f"[dim]saved to {escape(str(output))}[/dim]" if output else "[dim]not saved; give -o FILE[/dim]")
    if as_json:
        print_json(json.loads(_part("to_json")(spec)))


def _show(console: Console, spec: Any) -> None:
    tables = _part("cluster_tables")(spec)
    console.print(f"[bold]{escape(tables.title)}[/bold]")
    for heading, device, links in tables.groups:
        console.print(f"\n[bold]{escape(heading)}[/bold]")
        console.print(_filled(_table("per device", numbers=("value",), words=("source",)), device))
        console.print(_filled(_table("link", numbers=("per device", "latency"), words=("source",)), links))
    if tables.network:
        console.print()
        console.print(_filled(_table("link", numbers=("per device", "latency"), words=("source",)), tables.network))
    console.print("\n[bold]Together[/bold]")
    console.print(_filled(_table("", numbers=("",)), tables.total))


def _filled(table: Table, rows: tuple[tuple[str, ...], ...]) -> Table:
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _table(first: str, numbers: tuple[str, ...], words: tuple[str, ...] = ()) -> Table:
    """Heads of a column of words, of those of numbers, which stand right, and of more words."""
    shown = any((first, *numbers, *words))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), show_header=shown)
    for title, right in ((first, False), *((each, True) for each in numbers), *((each, False) for each in words)):
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table
