"""Sentences about what is wrong with a run: ``asyncflow doctor DIR|ADDRESS``.

Invariant: nothing is written, and no process of the run is changed.
"""

from __future__ import annotations

import click

from asyncflow.doctor.checks import CHECKS, examine
from asyncflow.doctor.reading import read
from asyncflow.view.console import print_json
from asyncflow.view.findings import finding_lines

FOUND = 1


def doctor(target: str, *, as_json: bool) -> int:
    """Print what is wrong with the run in a folder, or of the driver at an address; 1 where something is found.

    Raises ManifestError where there is no run.
    """
    evidence = read(target)
    found = examine(evidence)
    if as_json:
        print_json(found)
        return FOUND if found else 0
    for finding in found:
        click.echo("\n".join(finding_lines(finding)))
        click.echo()
    looked = f"{len(CHECKS)} checks over {len(evidence.steps)} steps of {evidence.name}"
    click.echo(f"{len(found)} found by {looked}" if found else f"nothing found by {looked}")
    return FOUND if found else 0
