"""A role, and the supervisor of a run, may open as many files and sockets as the hard limit allows, or say too few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"
LIMITED = """
import resource, sys
from pathlib import Path
from asyncflow.api.load import load_job
from asyncflow.errors import AsyncFlowError
from asyncflow.local.folder import RunFolder
from asyncflow.local.site import local_site
from asyncflow.local.supervisor import Limits
from asyncflow.plan.job import plan
from asyncflow.roles.context import RoleOptions, run_role

async def serve(context):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))

def supervise():
    with local_site(plan(load_job(job)).roles, folder=folder, limits=Limits()):
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))

job, workdir = map(Path, sys.argv[1:])
options = RoleOptions(role="storage", job=job, driver="tcp://a:1", index=0, attempt=0, workdir=workdir)
folder = RunFolder.claim(workdir / "run")
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
assert run_role(serve, options) == 0
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
supervise()
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 255))
try:
    supervise()
except AsyncFlowError as error:
    print(error)
sys.exit(run_role(serve, options))
"""


@pytest.mark.process
def test_a_role_and_a_supervisor_raise_their_limit_of_descriptors_to_the_hard_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(COUNTING), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    refusal = (
        "this process: it may open 255 files and sockets, and needs at least 256. Raise the hard limit (ulimit -Hn)"
    )
    assert ended.stdout == f"300 300\n300 300\n{refusal}\n", ended.stderr
    assert ended.returncode == 1
    assert ended.stderr.endswith(f"{refusal}\n")
    assert "Traceback" not in ended.stderr
