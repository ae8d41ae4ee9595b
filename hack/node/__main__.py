"""A node for manual use: ``python -m node up``, ``env``, ``down``.

``up`` leaves a holder process in the background, and the node ends with it. Invariant: a machine has at most one node,
and ``down`` returns after the node has been removed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from images.python import ImageError
from images.recipes import RECIPES, image
from kube.build import BuildError, binary
from kube.folder import owner, place_of
from kube.process import PlaneError, wait_until
from node import machine
from node.node import PLACE, Node

_UP_DEADLINE_S: Final = 900.0
_DOWN_DEADLINE_S: Final = 60.0
_ENV: Final = "env"


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="node", description="A cluster of one real node on this machine. Needs root.")
    commands = parser.add_subparsers(required=True)
    for run in (prepare, up, hold, down, env):
        command = commands.add_parser(run.__name__, description=run.__doc__)
        command.set_defaults(run=run)
        if run in (up, hold):
            command.add_argument("--images", nargs="*", default=(), choices=sorted(RECIPES), help="images to load")
            command.add_argument("--audit", action="store_true", help="record every request")
    arguments = parser.parse_args()
    try:
        return int(arguments.run(arguments))
    except (BuildError, ImageError, PlaneError) as error:
        print(error, file=sys.stderr)
        return 1


def prepare(_: argparse.Namespace) -> int:
    """Install the Debian packages that a node needs, and report other missing requirements."""
    machine.prepare(print)
    return 0


def up(_: argparse.Namespace) -> int:
    """Start a node that runs until ``down``, and print how to reach it."""
    place = place_of(PLACE)
    if owner(place) is not None:
        raise PlaneError("a node is up already: `down` ends it, `env` prints how to reach it")
    ready = place / _ENV
    ready.unlink(missing_ok=True)
    log = _log()
    with log.open("wb") as out:
        holder = subprocess.Popen(
            [sys.executable, "-m", "node", "hold", *sys.argv[2:]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_until(lambda: ready.exists() or holder.poll() is not None, f"the node; log: {log}", timeout_s=_UP_DEADLINE_S)
    print(log.read_text(), end="", file=sys.stderr)
    return 1 if holder.poll() is not None else env(_)


def hold(arguments: argparse.Namespace) -> int:
    """Run a node until SIGTERM or SIGINT; ``up`` starts this command in the background."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    with Node(audited=arguments.audit, say=say) as node:
        for name in arguments.images:
            node.load(image(name))
            say(f"image {name}")
        lines = {
            "KUBECONFIG": str(node.plane.admin),
            "KUBECACHEDIR": str(node.folder / "cache"),
            "PATH": f"{binary('kubectl').parent}:$PATH",
        }
        written = node.folder / f"{_ENV}.new"
        written.write_text("".join(f"export {name}={value}\n" for name, value in lines.items()))
        written.rename(node.folder / _ENV)
        signal.sigwait(signals)
    return 0


def down(_: argparse.Namespace) -> int:
    """End the node; succeed if there is none."""
    place = place_of(PLACE)
    if (holder := owner(place)) is not None:
        os.kill(holder, signal.SIGTERM)
        wait_until(lambda: owner(place) is None, "the node to end", timeout_s=_DOWN_DEADLINE_S)
    _log().unlink(missing_ok=True)
    return 0


def env(_: argparse.Namespace) -> int:
    """Print the shell commands that point kubectl to the node."""
    place = place_of(PLACE)
    if owner(place) is None:
        raise PlaneError("no node is up")
    print((place / _ENV).read_text(), end="")
    return 0


def _log() -> Path:
    place = place_of(PLACE)
    return place.with_name(f"{place.name}.log")


if __name__ == "__main__":
    sys.exit(main())
