"""A control plane for manual use: ``python -m kube up``, ``env``, ``down``.

``up`` leaves a holder process in the background, and the servers end with it. Invariant: a name has at most one plane,
and ``down`` returns after all of its processes have ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from kube.build import BuildError, binary
from kube.folder import owner, place_of
from kube.plane import ControlPlane
from kube.process import PlaneError, wait_until

_COMPONENTS: Final = ("kcm", "sched", "kwok")
_UP_DEADLINE_S: Final = 180.0
_DOWN_DEADLINE_S: Final = 60.0


def main() -> int:
    """Run one command."""
    arguments = _parser().parse_args()
    try:
        return int(arguments.run(arguments))
    except (BuildError, PlaneError) as error:
        print(error, file=sys.stderr)
        return 1


def up(arguments: argparse.Namespace) -> int:
    """Start a plane that runs until ``down``, and print how to reach it."""
    place = place_of(arguments.name)
    if owner(place) is not None:
        raise PlaneError(f"{arguments.name} is up already: `down` ends it, `env` prints how to reach it")
    for needed in ("etcd", *(["kwok"] if "kwok" in arguments.with_ else [])):
        binary(needed, say=lambda line: print(line, file=sys.stderr))
    ready = place / "ready"
    ready.unlink(missing_ok=True)
    log = _log(place)
    with log.open("wb") as out:
        holder = subprocess.Popen(
            [sys.executable, "-m", "kube", "hold", *sys.argv[2:]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_until(
        lambda: ready.exists() or holder.poll() is not None,
        f"the control plane; log: {log}",
        timeout_s=_UP_DEADLINE_S,
    )
    if holder.poll() is not None:
        raise PlaneError(log.read_text())
    return env(arguments)


def hold(arguments: argparse.Namespace) -> int:
    """Run a plane until SIGTERM or SIGINT; ``up`` starts this command in the background."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with ControlPlane(with_=arguments.with_, audited=arguments.audit, name=arguments.name) as plane:
        for folder in arguments.crds:
            plane.install_crds(folder)
        if arguments.nodes:
            plane.add_nodes(arguments.nodes)
        (plane.folder / "ready").touch()
        signal.sigwait(signals)
    return 0


def down(arguments: argparse.Namespace) -> int:
    """End a plane; succeed if there is none."""
    place = place_of(arguments.name)
    if (holder := owner(place)) is not None:
        os.kill(holder, signal.SIGTERM)
        wait_until(lambda: owner(place) is None, f"{arguments.name} to end", timeout_s=_DOWN_DEADLINE_S)
    _log(place).unlink(missing_ok=True)
    return 0


def env(arguments: argparse.Namespace) -> int:
    """Print the shell commands that point kubectl to the plane."""
    place = place_of(arguments.name)
    if owner(place) is None:
        raise PlaneError(f"{arguments.name} is not up")
    print(f"export KUBECONFIG={place / 'pki' / 'admin.kubeconfig'}")
    print(f"export KUBECACHEDIR={place / 'cache'}")
    print(f"export PATH={binary('kubectl').parent}:$PATH")
    return 0


def _log(place: Path) -> Path:
    return place.with_name(f"{place.name}.log")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kube", description="A real Kubernetes control plane on this machine.")
    commands = parser.add_subparsers(required=True)
    for run in (up, hold, down, env):
        command = commands.add_parser(run.__name__, description=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--name", default="default", help="name of the plane; a machine can have several")
        if run in (up, hold):
            command.add_argument("--with", dest="with_", nargs="*", default=(), choices=_COMPONENTS)
            command.add_argument("--nodes", type=int, default=0, help="fake nodes with 16 Ascend910 each; needs kwok")
            command.add_argument("--crds", type=Path, nargs="*", default=(), help="folders with CRDs to apply")
            command.add_argument("--audit", action="store_true", help="record every request")
    return parser


if __name__ == "__main__":
    sys.exit(main())
