"""Storage that outlives pods: claims and their mounts.

A claim is mounted as the whole folder of the run, not as parts of it: processes replace files and folders in it by
renaming, and a mount point cannot be renamed.

Invariants: a claim that is created for a job is deleted with it; an existing claim that the job names stays. Two jobs
that name the same claim use different folders of it, each with the name of its job. Only one pod mounts a claim for a
single writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncflow.api.durability import ClaimSpec
from asyncflow.api.job import RLJob
from asyncflow.api.names import CLAIMS_DIR, TASK, WORKDIR, RoleName, claim, kind_of_role
from asyncflow.api.queue import QueueSpec, TransferQueue
from asyncflow.plan.roles import Durable, Role
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest

_READS_MODEL: Final[tuple[RoleName, ...]] = ("driver", "trainer", "rollout", "reward", "reference", "critic", TASK)
_MODEL_CLAIM: Final = "pvc://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounted:
    """Mount of a claim in a pod. within: folder of the claim, "" for all of it; first: only for process 0."""

    volume: str
    claim: str
    path: str
    within: str = ""
    read_only: bool = False
    first: bool = False


def make_claim(family: Family, volume: Durable, spec: ClaimSpec, *, access_mode: str = "ReadWriteOnce") -> Manifest:
    """Return the claim for ``volume``; ``spec`` has a size."""
    body: Manifest = {"accessModes": [access_mode], "resources": {"requests": {"storage": str(spec.size)}}}
    if spec.storage_class is not None:
        body["storageClassName"] = spec.storage_class
    name = claim(family.name, volume)
    return stamped(make_object("v1", "PersistentVolumeClaim", family, name=name, body={"spec": body}))


def job_claims(job: RLJob, family: Family) -> tuple[Manifest, ...]:
    """Return the claims to create for a job."""
    storage = job.spec.storage
    made: list[Manifest] = []
    if job.spec.driver.claim is not None and job.spec.driver.claim.size is not None:
        made.append(make_claim(family, "driver", job.spec.driver.claim))
    if storage.ledger.claim is not None and storage.ledger.claim.size is not None:
        mode = _writers(job.spec.transfer_queue)
        made.append(make_claim(family, "ledger", storage.ledger.claim, access_mode=mode))
    if storage.checkpoints.claim is not None and storage.checkpoints.claim.size is not None:
        mode = storage.checkpoints.access_mode
        made.append(make_claim(family, "checkpoints", storage.checkpoints.claim, access_mode=mode))
    return tuple(made)


def queue_claims(queue: TransferQueue, family: Family) -> tuple[Manifest, ...]:
    """Return the claims to create for a queue without a job."""
    spec = queue.spec.ledger.claim
    if spec is None or spec.size is None:
        return ()
    return (make_claim(family, "ledger", spec, access_mode=_writers(queue.spec)),)


def _writers(queue: QueueSpec) -> str:
    """Return the access mode of the ledger claim; several controllers write from several nodes, each its own folder."""
    return "ReadWriteMany" if queue.controllers > 1 else "ReadWriteOnce"


def job_mounts(job: RLJob, role: Role) -> tuple[Mounted, ...]:
    """Return the mounts of a role of a job: its durable folders, and the model's claim if the model is on one."""
    storage = job.spec.storage
    specs: dict[Durable, ClaimSpec | None] = {
        "driver": job.spec.driver.claim,
        "ledger": storage.ledger.claim,
        "checkpoints": storage.checkpoints.claim,
    }
    shared = storage.checkpoints.access_mode == "ReadWriteMany"
    durable = (
        mounted
        for volume in role.durable
        for mounted in _folder(volume, specs[volume], job.name, first=role.gang and not shared)
    )
    reads = kind_of_role(role.name) in _READS_MODEL
    return (*durable, *(model_mounts(job.spec.model.source) if reads else ()))


def queue_mounts(queue: TransferQueue, role: Role) -> tuple[Mounted, ...]:
    """Return the mounts of a role of a queue without a job."""
    return tuple(
        mounted for volume in role.durable for mounted in _folder(volume, queue.spec.ledger.claim, queue.metadata.name)
    )


def _folder(volume: Durable, spec: ClaimSpec | None, owner: str, *, first: bool = False) -> tuple[Mounted, ...]:
    if spec is None:
        return ()
    name = spec.name or claim(owner, volume)
    return (Mounted(volume=volume, claim=name, path=WORKDIR, within=owner, first=first),)


def model_mounts(source: str) -> tuple[Mounted, ...]:
    """Return the mount of the claim that contains a model, nothing if the source is not a claim."""
    if not source.startswith(_MODEL_CLAIM):
        return ()
    name = source.removeprefix(_MODEL_CLAIM).partition("/")[0]
    return (Mounted(volume="model", claim=name, path=f"{CLAIMS_DIR}/{name}", read_only=True),)
