"""``asyncflow-operator``: the command line.

Invariant: the exit status is 0 after SIGTERM or SIGINT; 2 if a setting is wrong and nothing was started; 3 if a new
process must take over, because another operator leads, the set of namespaces with rights has changed, a watch has
ended, or the API server has gone back to an older state; 1 for any other failure. A user's mistake prints one line; a
traceback is a bug.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from pathlib import Path
from typing import Any, Final

import click

from asyncflow import __version__
from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow_operator.settings import PREFIX, Settings, options, settings

FAILED: Final = 1
USAGE: Final = 2
REPLACED: Final = 3

_log = logging.getLogger(__name__)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """The operator of AsyncFlow."""


@app.command()
@options
def run(**arguments: Any) -> int:
    """Watch RLJobs, TransferQueues and WeightSyncs, and place their roles as pods, until SIGTERM."""
    from asyncflow_operator.telemetry import setup_logging

    chosen = settings(arguments)
    setup_logging(chosen.log_level)
    return asyncio.run(_run(chosen))


_FOLDER: Final = click.option(
    "--decisions",
    "folder",
    envvar=f"{PREFIX}DECISIONS",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of the decision log.",
)


@app.command()
@click.argument("name", metavar="[NAMESPACE/]NAME")
@click.argument("pod", required=False)
@_FOLDER
def explain(name: str, pod: str | None, folder: Path) -> int:
    """Print the decisions about a job, a queue or a WeightSync, or one POD of it; exit status 1 if there are none."""
    from asyncflow_operator.review import sentences

    namespace, _, owner = name.rpartition("/")
    lines = list(sentences(_decisions(folder), name=owner, namespace=namespace or None, pod=pod))
    for line in lines or [f"no decision in {folder} is about {name}{f' and {pod}' if pod else ''}"]:
        click.echo(line)
    return 0 if lines else FAILED


@app.command(name="decide-again")
@click.argument("file", type=click.Path(path_type=Path))
def decide_again(file: Path) -> int:
    """Repeat the decisions of a decision log, one FILE or its folder; exit status 1 if a decision differs."""
    from asyncflow_operator import review

    count = redacted = 0
    differing = 0
    for line in _decisions(file):
        count, redacted = count + 1, redacted + line["redacted"]
        try:
            found = list(review.differences(*review.decide_again(line)))
        except (ValueError, KeyError) as error:
            hint = f"Repeat it with the version that wrote it: {line.get('version')}"
            raise ManifestError(f"decision {count} cannot be repeated: {error}", where=str(file), hint=hint) from error
        if found:
            differing += 1
            click.echo(f"{'/'.join(line['object'])} at {line['at']:.3f}, decided by {line['version']}:")
            for each in found:
                click.echo(f"  {each}")
    click.echo(f"{count} decisions repeated, {differing} differ")
    if redacted:
        click.echo(f"in {redacted} of them secrets were left out: changes of existing objects were not compared there")
    return FAILED if differing else 0


def _decisions(where: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, or of one of its files. Raises ManifestError if there is no readable log."""
    from asyncflow_operator.decisions import files_of, read_decisions

    files = files_of(where) if where.is_dir() else [where]
    hint = "Pass the folder that asyncflow-operator run has as --decisions"
    if not files:
        raise ManifestError("there is no decision log", where=str(where), hint=hint)
    try:
        return list(read_decisions(files))
    except OSError as error:
        raise ManifestError(f"cannot be read: {error.strerror}", where=str(where), hint=hint) from error
    except (ValueError, KeyError, TypeError) as wrong:
        raise ManifestError(f"is not a decision log: {wrong}", where=str(where), hint=hint) from wrong


def main() -> None:
    """Run the command line and exit."""
    try:
        sys.exit(app.main(prog_name="asyncflow-operator", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ManifestError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(USAGE)
    except AsyncFlowError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(FAILED)
    finally:
        gc.freeze()  # the process ends: no search for garbage in all of its modules


async def _run(chosen: Settings) -> int:
    from asyncflow_operator.cluster.client import Api
    from asyncflow_operator.cluster.kinds import MEMBERS
    from asyncflow_operator.operator import LeadershipLost, NamespacesChanged, Operator
    from asyncflow_operator.rights import served
    from asyncflow_operator.telemetry import Metrics
    from asyncflow_operator.watch import WatchEnded

    master = chosen.master_secret()
    metrics = Metrics()
    watches = len(MEMBERS) * max(1, len(chosen.namespaces))
    connections = chosen.connections + watches
    api = await Api.connect(kubeconfig=chosen.kubeconfig, connections=connections, answered=metrics.answered)
    leases = await Api.connect(kubeconfig=chosen.kubeconfig, connections=2, answered=metrics.answered)
    namespaces = await served(api, chosen.namespaces, current=chosen.namespaces)
    if without := sorted(set(chosen.namespaces) - set(namespaces)):
        _log.error("namespaces are left out: the operator has no rights there", extra={"without": ", ".join(without)})
    operator = Operator(chosen, api, namespaces=namespaces, leases=leases, master=master, metrics=metrics)

    def take_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, operator.stop)

    try:
        await operator.run(take_signals=take_signals)
    except (LeadershipLost, NamespacesChanged, WatchEnded):
        return REPLACED
    finally:
        await api.close()
        await leases.close()
    return 0
