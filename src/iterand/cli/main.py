"""The ``iterand`` command: its subcommands, and a one-line message for each error."""

# Commands import torch when they are called, so that help, completion and usage errors are fast.

import atexit
import gc
import os
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any

import typer

from iterand import __version__
from iterand.cli import bench, data, export, report, reproduce, theory, ticket, train
from iterand.cli.console import accept_any_text, err, out, warn
from iterand.errors import IterandError, sentence
from iterand.lab.training.environment import Interrupted
from iterand.memory import exhaustion_explained

_INTERRUPTED = 130  # exit code after Ctrl-C

app = typer.Typer(
    help="Train neural networks by pruning random weights, never training one (IteRand).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train.train)
app.command()(train.evaluate)
app.command()(train.recipes)
app.command()(reproduce.reproduce)
app.command()(report.report)
app.command()(export.export)
app.command()(bench.bench)
app.add_typer(ticket.app, name="ticket")
app.add_typer(theory.app, name="theory")
app.add_typer(data.app, name="data")


def _version(asked: bool) -> None:
    if asked:
        out.print(f"iterand {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line; an error is printed as one sentence."""
    warnings.showwarning = _show_warning
    accept_any_text()
    atexit.register(_skip_garbage)
    of_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may ignore it in the background
    if of_python and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)
    try:
        with exhaustion_explained("free some, or ask for less"):
            app()
    except Interrupted:
        err.print("stopped and saved; run the same command to resume")
        sys.exit(_INTERRUPTED)
    except KeyboardInterrupt:  # before typer has made its commands
        err.print("stopped")
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(1)
    except (IterandError, ValueError, OSError) as error:
        warn(sentence(error), "[bold red]error:[/]")
        sys.exit(1)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer turns Ctrl-C into this exit code
            err.print("stopped")
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop at Ctrl-C. During an import at once: one that an exception ends leaves half a module, or goes on."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    if any(getattr(spec, "_initializing", False) for spec in specs):
        os.write(2, b"stopped\n")
        os._exit(_INTERRUPTED)
    signal.default_int_handler(number, frame)


def _skip_garbage() -> None:
    """Skip the garbage collection at exit, which takes half a second.

    Not with Triton, which prints warnings about objects that were not collected.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    warn(str(message).partition("\nException raised from ")[0])  # without the stack of torch's C++


if __name__ == "__main__":
    main()
