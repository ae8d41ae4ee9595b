"""Names and bounds that cross between plan, substrates, operator and runtime: roles, ports, paths, labels, objects.

Invariant: each is written down once, here; a name is a pure function of job, role and index.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final, TypeAlias

API_VERSION: Final = "asyncflow.dev/v1alpha1"
GROUP, VERSION = API_VERSION.split("/")

RoleName: TypeAlias = str
"""The name of a role: one of ``ROLES``, or that of a user's task (``task_role``)."""
ROLES: Final[tuple[RoleName, ...]] = (
    "driver",
    "controller",
    "master",
    "holder",
    "storage",
    "rollout",
    "trainer",
    "publisher",
    "follower",
    "reference",
    "reward",
    "critic",
)
TASK: Final = "task"
"""The kind of role that runs a user's task: each such task is a role ``task-NAME``."""
TASK_NAME: Final = r"[a-z][a-z0-9]{0,15}"
"""The form of the name of a user's task."""
ROLE_NAME: Final = rf"(?:{'|'.join(ROLES)}|{TASK}-{TASK_NAME})"
"""The form of a role's name."""
QUEUE_ROLES: Final[tuple[RoleName, ...]] = ("controller", "master", "holder", "storage")
"""Roles that belong to a TransferQueue. ``holder`` holds the bytes of storage units that do not hold them themselves,
``master`` knows which holder has what."""

CONFIG_DIR: Final = "/etc/asyncflow"
"""Folder of manifest, certificate and token in a pod."""
JOB_FILE: Final = f"{CONFIG_DIR}/job.yaml"
"""Path of the manifest in a pod."""
REWARD_FILE: Final = f"{CONFIG_DIR}/reward.yaml"
ENVIRONMENT_FILE: Final = f"{CONFIG_DIR}/environment.yaml"
"""Path, in the container that scores, of the only part of the manifest that it sees: ``spec.reward``."""
TLS_DIR: Final = f"{CONFIG_DIR}/tls"
"""Folder of the certificate and key of a process, and of its authority's certificate, in a pod."""
TLS_ENV: Final = "ASYNCFLOW_TLS"
"""Variable that names that folder elsewhere."""
INSECURE_ENV: Final = "ASYNCFLOW_INSECURE"
"""Variable that, where it is ``1``, lets a process without a certificate serve others than those of its host."""
CERTIFICATE_FILES: Final = ("ca.crt", "tls.crt", "tls.key")
"""What lies in that folder: the authority's certificate, the process's own, and its private key, all in PEM."""
STORE_SECRET: Final = "store"  # noqa: S105 — a name, not a password
"""File beside a certificate with the password of the store that the job runs itself."""
STORE_ROLES: Final[tuple[RoleName, ...]] = ("holder", "storage")
"""Roles that have that file."""
CLIENT: Final = "client"
"""Role of whoever uses a queue that stands alone; any number of processes may share one certificate."""
VIEWER: Final = "viewer"
"""Role of a person who looks into a queue."""
OPERATOR: Final = "operator"
"""Role of whoever supervises a job: it directs the driver, looks into the queue, and drains its storage units."""
PUBLISHER: Final = "publisher"
"""Role of the process that publishes versions which no job trains, and that their followers dial."""
FOLLOWER: Final = "follower"
"""Role of whoever receives versions and has no other part in it; any number may share one certificate."""
FLEET: Final = "fleet"
"""What others must know of a follower: the WeightSync by which it follows."""
STORE_PASSWORD_FILE: Final = f"{CONFIG_DIR}/store-password"
"""Path, in the pods of storage units, of the password of a store that others run."""
STORE_PASSWORD_FILE_ENV: Final = "ASYNCFLOW_STORE_PASSWORD_FILE"  # noqa: S105 — a name, not a password
"""Variable that names the file with that password elsewhere."""
TOKEN_FILE: Final = f"{CONFIG_DIR}/token"
"""Path of the bearer token of the driver's POST routes in a pod."""
TOKEN_FILE_ENV: Final = "ASYNCFLOW_TOKEN_FILE"  # noqa: S105 — a name, not a token
"""Variable that names the file with the bearer token."""
REWARD_SOCKET: Final = "/run/asyncflow/rewards/socket"
"""Socket at which, in the pod of a rollout or of the role ``reward``, the container that scores listens."""
ENVIRONMENT_SOCKET: Final = f"{REWARD_SOCKET.rpartition('/')[0]}/environment"
"""Socket beside it, at which the same container answers the turns of the model."""
REWARD_VARIABLES: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Variables that a process which scores has from whoever starts it; all others are kept from it."""
TRAIN: Final = "train"
EVAL: Final = "eval"
"""The partitions of a job."""
LOSS_MASK: Final = "loss_mask"
"""Column of rows of several turns: bool for each response token, False where the policy did not choose it."""
REWARD_SOCKET_ENV: Final = "ASYNCFLOW_REWARD_SOCKET"
"""Variable that names that socket to the process beside."""
LAST_WORDS_FILE: Final = "/dev/termination-log"
LAST_WORDS_ENV: Final = "ASYNCFLOW_LAST_WORDS"
"""Names the file into which a driver that is done writes the phase and the figures with which it leaves the job."""
HANDED_ON: Final = "its work is handed on"
"""Reason with which a rollout leaves its driver where it was told to, and is not lost."""
HOST_ENV: Final = "ASYNCFLOW_HOST"
"""Variable with the address that a role serves on; loopback where it is not set."""
NODE_ENV: Final = "ASYNCFLOW_NODE"
"""Variable with the name of the node that a role runs on; the host's own name where it is not set."""
LEAVE_ENV: Final = "ASYNCFLOW_LEAVE_SECONDS"
"""Variable with the seconds that a storage unit told to end has to take its rows to others; none where it is not set,
because who ends a unit without naming a time ends the others with it."""
WORKDIR: Final = "/var/lib/asyncflow"
"""The folder of the run in a pod: ``ledger``, ``checkpoints``, ``export`` and what a role makes for itself."""
CLAIMS_DIR: Final = "/mnt"
"""Folder in which pods mount the claims that a manifest names, each under its name."""

LEAST_BYTES: Final = 1 << 20
"""No storage unit holds less: whoever looks for room for at most so much never hears that it can never be had."""

RPC_PORT: Final = 5571
"""Port of a role's RPC server, where it has an address of its own."""
HTTP_PORT: Final = 9571
"""Port of /metrics, /healthz, /readyz and the driver's status."""
CONTROL_PORT: Final = 7571
"""Port of the driver's control service. It is not beside the other, since on a host's network those run on from it."""
GANG_PORT: Final = 29571
"""Port at which trainer rank 0 meets the other ranks."""

LABEL_JOB: Final = f"{GROUP}/job"
LABEL_QUEUE: Final = f"{GROUP}/queue"
"""Label of what a TransferQueue owns, its own name; also where the queue belongs to a job."""
LABEL_FOLLOWS: Final = f"{GROUP}/follows"
"""Label of pods that somebody else runs: the job, or the WeightSync, whose versions they follow."""
LABEL_SYNC: Final = f"{GROUP}/weights"
"""Label of what a WeightSync owns that publishes by itself, its own name."""
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_INDEX: Final = f"{GROUP}/index"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
FIELD_MANAGER: Final = "asyncflow-operator"
MANAGED: Final = MappingProxyType(
    {"app.kubernetes.io/managed-by": FIELD_MANAGER, "app.kubernetes.io/part-of": "asyncflow"}
)
"""Labels of everything that the operator makes."""
DIGEST: Final = f"{GROUP}/digest"
"""Annotation of what the operator makes: what it was made from, in short, so that it is not written again."""
FOLDER: Final = f"{GROUP}/folder"
"""Annotation of a resolved manifest: the folder of the file that it was made from, where relative paths start."""
CONTAINER: Final = "asyncflow"
"""The container of a pod in which the role runs; a template that names it changes it."""
REWARD_CONTAINER: Final = "rewards"
"""The container of a rollout's pod in which samples are scored: without any Secret."""


def task_role(task: str) -> RoleName:
    """Return the role that runs a user's task."""
    return f"{TASK}-{task}"


def kind_of_role(role: RoleName) -> str:
    """Return what decides about a role's rights and its module: ``task`` for all users' tasks, else the role itself."""
    return TASK if re.fullmatch(rf"{TASK}-{TASK_NAME}", role) else role


def module_of_role(role: RoleName) -> str:
    """Return the name of the module whose ``main`` is the role."""
    kind = kind_of_role(role)
    return f"asyncflow.roles.{'stores' if kind in ('holder', 'master') else kind}"


def instance(job: str, role: RoleName, index: int) -> str:
    """Return the name of one process of a job, e.g. ``quickstart-rollout-2``."""
    return f"{job}-{role}-{index}"


def labels(job: str, role: RoleName) -> dict[str, str]:
    """Return the labels by which the processes of a role are found."""
    return {LABEL_JOB: job, LABEL_ROLE: role}


def service(owner: str, role: RoleName) -> str:
    """Return the name of the service of a role, e.g. ``quickstart-driver``: of the leader, or of a gang (headless)."""
    return f"{owner}-{role}"


def secret(owner: str, part: str, mark: str) -> str:
    """Return the name of a Secret, e.g. ``quickstart-tls-rollout-4be5c0a1d2f39e87``."""
    return f"{owner}-{part}-{mark}"


def claim(owner: str, volume: str) -> str:
    """Return the name of a claim that is made for ``volume`` (``ledger`` or ``checkpoints``)."""
    return f"{owner}-{volume}"
