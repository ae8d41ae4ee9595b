"""Report of the problems of a run: ``asyncflow doctor DIR|ADDRESS``.

Invariant: the command writes no file, and does not affect any process of the run.
"""

from __future__ import annotations

import click

from asyncflow.doctor.checks import CHECKS, examine
from asyncflow.doctor.reading import read
from asyncflow.view.console import print_json
from asyncflow.view.findings import finding_lines

FOUND = 1


def doctor(target: str, *, as_json: bool) -> int:
    """Print the problems of the run in a folder, or of the driver at an address; return 1 if there are any, else 0.

    Raises ManifestError if there is no run.
    """
    evidence = read(target)
    found = examine(evidence)
    if as_json:
        print_json(found)
        return FOUND if found else 0
    for finding in found:
        click.echo("\n".join(finding_lines(finding)))
        click.echo()
    checks = f"{len(CHECKS)} checks over {len(evidence.steps)} steps of {evidence.name}"
    click.echo(f"{len(found)} found by {checks}" if found else f"nothing found by {checks}")
    return FOUND if found else 0
