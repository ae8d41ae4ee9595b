"""``asyncflow-operator``: the command line.

Invariant: exit status 0 after SIGTERM or SIGINT, 2 where a setting is wrong and nothing was started, 3 where another
operator leads now, 1 for anything else; a mistake of the user costs one line, and a traceback is a bug.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Any, Final

import click

from asyncflow import __version__
from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow_operator.settings import Settings, options, settings

FAILED: Final = 1
USAGE: Final = 2
LEADERSHIP_LOST: Final = 3

_log = logging.getLogger(__name__)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """The operator of AsyncFlow."""


@app.command()
@options
def run(**given: Any) -> int:
    """Watch RLJobs, TransferQueues and WeightSyncs, and place their roles as pods, until SIGTERM."""
    from asyncflow_operator.telemetry import setup_logging

    chosen = settings(given)
    setup_logging(chosen.log_level)
    return asyncio.run(_run(chosen))


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


async def _run(chosen: Settings) -> int:
    from asyncflow_operator.cluster.client import Api
    from asyncflow_operator.cluster.kinds import MEMBERS
    from asyncflow_operator.operator import LeadershipLost, Operator
    from asyncflow_operator.telemetry import Metrics

    master = chosen.master_secret()
    metrics = Metrics()
    watches = len(MEMBERS) * max(1, len(chosen.namespaces))
    connections = chosen.connections + watches
    api = await Api.connect(kubeconfig=chosen.kubeconfig, connections=connections, answered=metrics.answered)
    leases = await Api.connect(kubeconfig=chosen.kubeconfig, connections=2, answered=metrics.answered)
    operator = Operator(chosen, api, leases=leases, master=master, metrics=metrics)

    def take_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, operator.stop)

    try:
        await operator.run(take_signals=take_signals)
    except LeadershipLost:
        return LEADERSHIP_LOST
    finally:
        await api.close()
        await leases.close()
    return 0
