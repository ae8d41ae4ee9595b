"""A role may open as many files and sockets as its process is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"
ROLE = """
import resource, sys
from pathlib import Path
from asyncflow.roles.context import RoleOptions, run_role

async def serve(context):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
job, workdir = map(Path, sys.argv[1:])
options = RoleOptions(role="storage", job=job, driver="tcp://a:1", index=0, attempt=0, workdir=workdir)
sys.exit(run_role(serve, options))
"""


@pytest.mark.process
def test_a_role_raises_its_limit_of_descriptors_to_the_hard_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ROLE, str(COUNTING), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "300 300\n"
