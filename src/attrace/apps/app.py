"""The commands and their options.  Importing this costs typer only: a command imports what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attrace.apps import options

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help pages cost 0.1 s: they import a Markdown parser and pygments
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[
    str,
    typer.Option(
        help="The output to explain: auto, class:LABEL, token:POSITION, next:TEXT, or a contrast next:A~B, class:A~B.",
        metavar="TARGET",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help=f"How to score: {', '.join(options.METHODS)}; auto takes what was measured best for the model.",
        metavar="NAME",
    ),
]
Html = Annotated[Path | None, typer.Option(help="Also write a report as one HTML file.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Top = Annotated[
    int | None,
    typer.Option(help="How many words to list. Default: 10, in a report 20.", min=1, max=10_000, metavar="N"),
]
Words = Annotated[bool, typer.Option("--words/--tokens", help="List words or the model's own tokens.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no progress.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"attrace {version('attrace')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """See which inputs a Transformer's output drew on, and how far the picture can be trusted."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def explain(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="The text; @FILE for a file in UTF-8; - for standard input; @@ for a text starting with @.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A model's folder or a hub name. Default: the embedded spam classifier.", metavar="MODEL"),
    ] = None,
    target: Target = "auto",
    method: Method = "auto",
    layers: Annotated[
        str | None, typer.Option(help='Layers to use, as in "0,2,5-7" or "-1". Default: all.', metavar="LIST")
    ] = None,
    heads: Annotated[
        str,
        typer.Option(help="How to fuse heads: mean, max, min, one head's index, or a weight per head.", metavar="HOW"),
    ] = "mean",
    residual: Annotated[float, typer.Option(help="Share of the residual stream in a layer.", metavar="SHARE")] = 0.5,
    discard: Annotated[float, typer.Option(help="Share of the weakest attention to leave out.", metavar="SHARE")] = 0.0,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is too long for the model.")] = False,
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps.", metavar="DEVICE")] = None,
    seed: Annotated[int, typer.Option(help="For methods that draw at random.", min=0, metavar="N")] = 0,
    html: Html = None,
    as_json: Json = False,
    top: Top = None,
    words: Words = True,
    quiet: Quiet = False,
) -> None:
    """Show which words of INPUT the model's output drew on."""
    # Usage errors come before anything is imported, read or loaded.
    chosen_layers, chosen_heads = options.layers(layers), options.heads(heads)

    from attrace.apps import inputs
    from attrace.apps.explain import Output, Question, answer, check_output

    output = Output(html=html, as_json=as_json, top=top, units="words" if words else "tokens", quiet=quiet)
    check_output(output, source=inputs.file_of(source))
    text = inputs.read(source)
    question = Question(
        model=model,
        target=target,
        method=method,
        layers=chosen_layers,
        heads=chosen_heads,
        residual=residual,
        discard=discard,
        truncate=truncate,
        device=device,
        seed=seed,
    )
    answer(text, question, output)


@app.command()
def demo(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which e-mail; see --list.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the e-mails and stop.")] = False,
    target: Target = "auto",
    method: Method = "auto",
    html: Html = None,
    as_json: Json = False,
    top: Top = None,
    words: Words = True,
    quiet: Quiet = False,
) -> None:
    """Explain an e-mail that comes with attrace."""
    from dataclasses import asdict

    from attrace.apps import samples
    from attrace.apps.explain import Output, Question, answer, check_output
    from attrace.apps.terminal import print_json, print_lines, tell

    if show_list:
        known = samples.samples()
        if as_json:
            print_json([asdict(sample) for sample in known])
        else:
            width = max(len(sample.name) for sample in known)
            print_lines(f"{sample.name:<{width}}  {sample.label:<4}  {sample.about}" for sample in known)
        return
    sample = samples.find(name)
    output = Output(html=html, as_json=as_json, top=top, units="words" if words else "tokens", quiet=quiet)
    check_output(output)
    if not quiet:
        tell("sample", f"{sample.name} ({sample.label}): {sample.about}")
    answer(samples.text(sample), Question(target=target, method=method), output)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, what is missing and where things are."""
    from attrace.apps import doctor as ward
    from attrace.apps.terminal import print_json, print_lines

    found = ward.examine()
    if as_json:
        print_json(found)
    else:
        print_lines(ward.lines(found))
