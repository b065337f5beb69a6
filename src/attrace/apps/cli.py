"""The `attrace` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attrace {version('attrace')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """See which inputs a Transformer's output drew on."""


def main() -> None:
    """Run the command line."""
    app()
