"""The command line. Results go to stdout, progress and messages to stderr; exit 0 done, 1 failed, 2 bad input.

Each command imports what it needs when it runs, so that `moetis --help` and the offline commands start without Ray.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_cache import cache_commands
from cluster.cli_interchange import interchange_commands
from cluster.cli_offline import JsonOption, offline_commands
from cluster.cli_rebalance import ConfigOption, rebalance_commands
from cluster.cli_report import report_commands
from cluster.cli_scale import scale_commands
from cluster.cli_top import top_commands
from cluster.cli_topology import topology_commands
from cluster.cli_whatif import whatif_commands
from cluster.terminal import LOG, OUT, hold_streams, show_result
from placement.errors import ConfigError, InputError, MoetisError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Place the experts of Mixture-of-Experts models on the GPUs of a cluster, and serve them from there.\n\n"
    "Start with [bold]moetis demo[/bold]: the whole loop on a small real model, in a minute or two.",
)

app.add_typer(offline_commands)
app.add_typer(cache_commands)
app.add_typer(rebalance_commands)
app.add_typer(scale_commands)
app.add_typer(whatif_commands)
app.add_typer(top_commands)
app.add_typer(topology_commands, name="topology")
app.add_typer(report_commands)
app.add_typer(interchange_commands)


@app.command()
def demo(
    run_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Default: runs/demo-DATE here.")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help='JSON lines of {"kind", "prompt"}.')] = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="Use the first N prompts.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write for each prompt.")] = 40,
    as_json: JsonOption = False,
) -> None:
    """Run the whole loop on a small real model: serve, learn, re-place live, check every text, report.

    Needs no network and no GPU. Starts a Ray cluster of its own, which ends with it.
    """
    from cluster import demo_run, demo_view

    name = f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(run_dir) if run_dir is not None else Path("runs") / name
    config = demo_run.demo_config(folder)
    source = Path(prompts) if prompts is not None else demo_run.DEMO_PROMPTS
    result = demo_run.run_demo(config, source, num_prompts=num_prompts, max_new_tokens=max_new_tokens)
    page = demo_view.write_report(result, folder)
    figures = demo_view.to_dict(result) | {"report": str(page)}
    show_result(as_json, figures, lambda: demo_view.print_result(result, page, OUT))
    if not result.ok:
        LOG.print(f"[bold red]the demo failed:[/bold red] {demo_view.why_not(result)}")
        raise typer.Exit(1)


@app.command()
def serve(
    config: ConfigOption,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Listen there, with OpenAI's API, in place of stdin.")
    ] = None,
) -> None:
    """Serve a model on a cluster: with OpenAI's API over HTTP, or on stdin and stdout, a JSON object a line each.

    [dim]moetis serve --config configs/clusters/demo.yaml --http 127.0.0.1:8000[/dim]

    On stdin: {"id": "a", "prompt": "def main(", "max_new_tokens": 32, "stream": true}, or {"cancel": "a"}.
    Out: {"id", "text", "tokens"} as they come, then "end": "finished", "cancelled" or "failed" (with "error").
    Ends with Ctrl-C, or at the end of stdin. `moetis rebalance` with the same file re-places its experts meanwhile.

    [dim]echo '{"id": "a", "prompt": "def main("}' | moetis serve --config configs/clusters/demo.yaml[/dim]
    """
    from cluster.config import load_config
    from cluster.serve import run_serve

    if http is not None:
        from cluster.gateway.deploy import parse_address
        from cluster.gateway.serving import run_gateway

        with redirect_stdout(sys.stderr):
            run_gateway(load_config(config), parse_address(http))
        return
    if sys.stdin is None:
        raise ConfigError("stdin is closed; requests come on stdin, or over HTTP with --http")
    cluster = load_config(config)
    # Ray tells of dead workers by printing to sys.stdout, where answers alone belong.
    with open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False) as answers, redirect_stdout(sys.stderr):
        run_serve(cluster, sys.stdin.fileno(), answers)


def _interrupt(number: int, frame: object) -> None:
    # A second signal would break into the cleaning up and leave processes behind.
    for again in _SIGNALS:
        signal.signal(again, lambda number, frame: None)
    raise KeyboardInterrupt


def main() -> None:
    """Entry of the `moetis` command."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        hold_streams()
        try:
            app(standalone_mode=True)
        finally:
            # What can't be written is still told; at exit Python would do that, in its own words.
            sys.stdout.flush()
    except InputError as error:
        LOG.print(f"moetis: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except MoetisError as error:
        LOG.print(f"moetis: failed: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except SystemExit as ended:
        # As typer ends commands that were interrupted.
        if ended.code == INTERRUPTED:
            LOG.print("interrupted")
        raise
    except KeyboardInterrupt:
        LOG.print("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout left; nothing more can be said there, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        # Results that could not be written, to a full disk say: what is left of them must not be tried again at exit.
        LOG.print(f"moetis: failed: {error.filename or 'stdout'}: {error.strerror}", markup=False, soft_wrap=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
