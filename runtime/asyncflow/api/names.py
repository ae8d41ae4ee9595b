"""Names that cross between the plan, the substrates and the runtime: roles, ports, paths, labels.

Invariant: a name is written down once, here; it is a pure function of job, role and index.
"""

from __future__ import annotations

from typing import Final, Literal

from asyncflow.api.base import GROUP

RoleName = Literal["driver", "controller", "storage", "rollout", "trainer", "reference", "reward", "critic"]

JOB_FILE: Final = "/etc/asyncflow/job.yaml"
"""Where the manifest lies in a pod."""
KEY_FILE: Final = "/etc/asyncflow/key"
"""Where the job's key lies in a pod."""
KEY_FILE_ENV: Final = "ASYNCFLOW_KEY_FILE"
"""Variable that names the job's key file elsewhere."""

RPC_PORT: Final = 5571
"""Port of a role's RPC server, where it has an address of its own."""
HTTP_PORT: Final = 9571
"""Port of /metrics, /healthz, /readyz, and of the driver's service."""
GANG_PORT: Final = 29571
"""Port at which trainer rank 0 meets the other ranks."""

LABEL_JOB: Final = f"{GROUP}/job"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_INDEX: Final = f"{GROUP}/index"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
FIELD_MANAGER: Final = "asyncflow-operator"


def instance(job: str, role: RoleName, index: int) -> str:
    """Give the name of one process of a job, e.g. ``quickstart-rollout-2``."""
    return f"{job}-{role}-{index}"


def labels(job: str, role: RoleName) -> dict[str, str]:
    """Give the labels by which the processes of a role are found."""
    return {LABEL_JOB: job, LABEL_ROLE: role}


FOLDER = f"{GROUP}/folder"
"""Annotation of a resolved manifest: the folder of the file that it was made from, where relative paths start."""
