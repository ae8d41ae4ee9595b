"""Names and bounds that plan, substrates, operator and runtime share: roles, ports, paths, labels, objects.

Invariants: each name is defined only here. The name of an object is a pure function of job, role and index.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final, TypeAlias

API_VERSION: Final = "asyncflow.dev/v1alpha1"
GROUP, VERSION = API_VERSION.split("/")

RoleName: TypeAlias = str
"""The name of a role: one of ``ROLES``, or the role of a user's task (``task_role``)."""
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
"""Regular expression of the name of a user's task."""
ROLE_NAME: Final = rf"(?:{'|'.join(ROLES)}|{TASK}-{TASK_NAME})"
"""Regular expression of the name of a role."""
QUEUE_ROLES: Final[tuple[RoleName, ...]] = ("controller", "master", "holder", "storage")
"""Roles that belong to a TransferQueue. A ``holder`` holds the bytes of storage units that do not hold them themselves;
the ``master`` knows which holder has which bytes."""

CONFIG_DIR: Final = "/etc/asyncflow"
"""Folder of the manifest, the certificate and the token in a pod."""
JOB_FILE: Final = f"{CONFIG_DIR}/job.yaml"
"""Path of the manifest in a pod."""
REWARD_FILE: Final = f"{CONFIG_DIR}/reward.yaml"
"""Path of ``spec.reward`` in the container that scores; the container does not see the rest of the manifest."""
ENVIRONMENT_FILE: Final = f"{CONFIG_DIR}/environment.yaml"
"""Path of ``spec.environment`` in the same container."""
TLS_DIR: Final = f"{CONFIG_DIR}/tls"
"""Folder, in a pod, of the certificate and key of the process and of the certificate of its authority."""
TLS_ENV: Final = "ASYNCFLOW_TLS"
"""Variable that names that folder outside of pods."""
INSECURE_ENV: Final = "ASYNCFLOW_INSECURE"
"""Variable that, if it is ``1``, allows a process without a certificate to serve processes of other hosts."""
CERTIFICATE_FILES: Final = ("ca.crt", "tls.crt", "tls.key")
"""Files in that folder: the authority's certificate, the process's own, and its private key, all in PEM."""
STORE_SECRET: Final = "store"  # noqa: S105 — a name, not a password
"""File next to a certificate with the password of the store that the job itself runs."""
STORE_ROLES: Final[tuple[RoleName, ...]] = ("holder", "storage")
"""Roles that have that file."""
CLIENT: Final = "client"
"""Role of a process that uses a standalone queue; any number of processes may share one certificate."""
VIEWER: Final = "viewer"
"""Role of a user who inspects a queue."""
OPERATOR: Final = "operator"
"""Role of the supervisor of a job: it directs the driver, inspects the queue, and drains the storage units."""
PUBLISHER: Final = "publisher"
"""Role of the process that publishes versions that no job trains; their followers connect to it."""
FOLLOWER: Final = "follower"
"""Role of a process that only receives versions; any number may share one certificate."""
FLEET: Final = "fleet"
"""Property of a follower in the directory: the name of the WeightSync by which it follows."""
STORE_PASSWORD_FILE: Final = f"{CONFIG_DIR}/store-password"
"""Path, in the pods of storage units, of the password of a store that the job does not run."""
STORE_PASSWORD_FILE_ENV: Final = "ASYNCFLOW_STORE_PASSWORD_FILE"  # noqa: S105 — a name, not a password
"""Variable that names the file with that password outside of pods."""
TOKEN_FILE: Final = f"{CONFIG_DIR}/token"
"""Path of the bearer token of the driver's POST routes in a pod."""
TOKEN_FILE_ENV: Final = "ASYNCFLOW_TOKEN_FILE"  # noqa: S105 — a name, not a token
"""Variable that names the file with the bearer token."""
REWARD_SOCKET: Final = "/run/asyncflow/rewards/socket"
"""Socket of the container that scores, in the pod of a rollout or of the role ``reward``."""
ENVIRONMENT_SOCKET: Final = f"{REWARD_SOCKET.rpartition('/')[0]}/environment"
"""Second socket of that container, at which it answers the turns of the model."""
REWARD_VARIABLES: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Environment variables that a process that scores inherits; it gets no others."""
TRAIN: Final = "train"
EVAL: Final = "eval"
"""The partitions of a job."""
LOSS_MASK: Final = "loss_mask"
"""Column of rows of several turns: bool for each response token, False for a token that the policy did not choose."""
REWARD_SOCKET_ENV: Final = "ASYNCFLOW_REWARD_SOCKET"
"""Variable that names ``REWARD_SOCKET`` to the role's process in the other container of the pod."""
TERMINATION_MESSAGE_FILE: Final = "/dev/termination-log"
LAST_WORDS_ENV: Final = "ASYNCFLOW_LAST_WORDS"
"""Variable that names the file into which a driver that ends writes the final phase and figures of the job."""
HANDED_ON: Final = "its work is handed on"
"""Reason that a rollout reports when it leaves its driver on request, so that it does not count as lost."""
HOST_ENV: Final = "ASYNCFLOW_HOST"
"""Variable with the address that a role serves on; the default is loopback."""
NODE_ENV: Final = "ASYNCFLOW_NODE"
"""Variable with the name of the node that a role runs on; the default is the name of the host."""
LEAVE_ENV: Final = "ASYNCFLOW_LEAVE_SECONDS"
"""Variable with the seconds in which a terminating storage unit moves its rows to other units. Without it the unit
moves no rows, because all units then end together."""
WORKDIR: Final = "/var/lib/asyncflow"
"""Folder of the run in a pod: ``ledger``, ``checkpoints``, ``export`` and files that a role makes for itself."""
CLAIMS_DIR: Final = "/mnt"
"""Folder in which pods mount the claims that a manifest names, each under its name."""

LEAST_BYTES: Final = 1 << 20
"""Least capacity of a storage unit, so a request for at most so many bytes is never refused as impossible."""

RPC_PORT: Final = 5571
"""Port of a role's RPC server, if the role has an address of its own."""
HTTP_PORT: Final = 9571
"""Port of /metrics, /healthz, /readyz and the driver's status."""
CONTROL_PORT: Final = 7571
"""Port of the driver's control service. It is far from ``HTTP_PORT``, since pods on the host's network use the ports
from ``HTTP_PORT`` upwards."""
GANG_PORT: Final = 29571
"""Port of trainer rank 0 at which the ranks rendezvous."""

LABEL_JOB: Final = f"{GROUP}/job"
LABEL_QUEUE: Final = f"{GROUP}/queue"
"""Label of objects that a TransferQueue owns, including the queue of a job: the name of the TransferQueue."""
LABEL_FOLLOWS: Final = f"{GROUP}/follows"
"""Label of followers' pods, which the operator does not create: the job, or the WeightSync, that they follow."""
LABEL_SYNC: Final = f"{GROUP}/weights"
"""Label of objects that a WeightSync with a publisher owns: the name of the WeightSync."""
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_INDEX: Final = f"{GROUP}/index"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
FIELD_MANAGER: Final = "asyncflow-operator"
MANAGED: Final = MappingProxyType(
    {"app.kubernetes.io/managed-by": FIELD_MANAGER, "app.kubernetes.io/part-of": "asyncflow"}
)
"""Labels of every object that the operator creates."""
DIGEST: Final = f"{GROUP}/digest"
"""Annotation of objects that the operator creates: a digest of their desired content, to avoid needless writes."""
FOLDER: Final = f"{GROUP}/folder"
"""Annotation of a resolved manifest: the folder of the original file, at which relative paths start."""
CONTAINER: Final = "asyncflow"
"""The container of a pod in which the role runs; a template may change it by this name."""
REWARD_CONTAINER: Final = "rewards"
"""The container of a pod in which samples are scored; it has no Secret."""


def task_role(task: str) -> RoleName:
    """Return the role that runs a user's task."""
    return f"{TASK}-{task}"


def kind_of_role(role: RoleName) -> str:
    """Return the kind that determines the rights and the module of a role: ``task`` for users' tasks, or the role."""
    return TASK if re.fullmatch(rf"{TASK}-{TASK_NAME}", role) else role


def module_of_role(role: RoleName) -> str:
    """Return the name of the module whose ``main`` is the role."""
    kind = kind_of_role(role)
    return f"asyncflow.roles.{'stores' if kind in ('holder', 'master') else kind}"


def instance(job: str, role: RoleName, index: int) -> str:
    """Return the name of one process of a job, e.g. ``quickstart-rollout-2``."""
    return f"{job}-{role}-{index}"


def labels(job: str, role: RoleName) -> dict[str, str]:
    """Return the labels that select the pods of a role."""
    return {LABEL_JOB: job, LABEL_ROLE: role}


def service(owner: str, role: RoleName) -> str:
    """Return the name of the Service of a role, e.g. ``quickstart-driver``: of its leader, or headless of a gang."""
    return f"{owner}-{role}"


def secret(owner: str, part: str, mark: str) -> str:
    """Return the name of a Secret, e.g. ``quickstart-tls-rollout-4be5c0a1d2f39e87``."""
    return f"{owner}-{part}-{mark}"


def claim(owner: str, volume: str) -> str:
    """Return the name of a claim that the operator creates for ``volume`` (``ledger`` or ``checkpoints``)."""
    return f"{owner}-{volume}"
