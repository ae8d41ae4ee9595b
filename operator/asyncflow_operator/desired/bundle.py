"""All desired objects of a job, a queue or a publisher, as one set of pure functions.

Invariant: equal states give equal bytes. The objects depend on the spec, the owner's identity, the pinned images and
the settings. Of the observed objects, only an admitted Workload with its flavors (for pods) and a priority class (for a
Workload) matter, so objects are not applied again after every change in the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from asyncflow.api.job import RLJob
from asyncflow.api.names import PUBLISHER, REWARD_CONTAINER, RoleName
from asyncflow.api.queue import TransferQueue
from asyncflow.api.weights import WeightSync
from asyncflow.plan import plan
from asyncflow.plan.queue import queue_roles
from asyncflow.plan.roles import Role
from asyncflow_operator.desired.blueprint import (
    Blueprint,
    Registry,
    image_of,
    job_blueprint,
    leader_address,
    publisher_blueprint,
    queue_blueprint,
    scoring_roles,
    templates_of,
)
from asyncflow_operator.desired.gang import granted, make_gang
from asyncflow_operator.desired.objects import Family, family_of
from asyncflow_operator.desired.pods import make_pod
from asyncflow_operator.desired.secrets import OwnerSecrets, SecretPart
from asyncflow_operator.desired.storage import job_claims, queue_claims
from asyncflow_operator.desired.supporting import (
    make_account,
    make_budget,
    make_children,
    make_config,
    make_driver_policy,
    make_egress_policy,
    make_gang_service,
    make_leader_service,
    make_network_policy,
    make_store_policy,
)
from asyncflow_operator.observed import JobState, Manifest, Owner, SyncState, TransferQueueState

_STORES: Final = ("master", "holder")
"""Roles whose processes are those of a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredSettings:
    """Settings of the operator that affect the objects it creates.

    registry: location of its images; master: the secret from which all others are derived; namespace: the operator's
    own namespace; watchers: namespaces that may read metrics and status, including the operator's own.
    """

    registry: Registry
    master: bytes = field(repr=False)
    namespace: str = "asyncflow-system"
    watchers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Desired:
    """Builder of the desired objects. A method that takes a state raises ValueError if it has no accepted spec."""

    settings: DesiredSettings

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Return all objects of a job except pods, Secrets and custom resources, in the order to apply them."""
        job, family = _job(state), family_of(state.owner)
        roles = plan(job).roles
        core = [role for role in roles if role.core and role.name != "rollout"]
        gangs = [role for role in roles if role.spread]
        return (
            make_account(family),
            make_config(job, family),
            *self._policies(family, roles),
            make_driver_policy(family, watchers=self.settings.watchers, operator=self.settings.namespace),
            make_egress_policy(family, roles=scoring_roles(job.spec), network=job.spec.reward.network),
            make_leader_service(family, "driver"),
            *(make_gang_service(family, role.name) for role in gangs),
            *job_claims(job, family),
            make_budget(family, roles=[role.name for role in core], pods=sum(role.core for role in core)),
            *self._gang(state, roles),
        )

    def children(self, state: JobState) -> tuple[Manifest, ...]:
        """Return the TransferQueue and the WeightSync of the job itself."""
        return make_children(_job(state), family_of(state.owner))

    def pod(self, state: JobState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return a pod of the job. Raises KeyError if the job does not have the role."""
        return make_pod(self._of_job(state, role, owner=state.owner), index=index, attempt=attempt)

    def queue_supporting(self, state: TransferQueueState) -> tuple[Manifest, ...]:
        """Return all objects except Secrets that a queue's pods need; none for a job's queue, as the job has them."""
        if state.job is not None:
            return ()
        queue, family = _queue(state), family_of(state.owner)
        roles = queue_roles(queue)
        return (
            make_account(family),
            make_config(queue, family),
            *self._policies(family, roles, open_to_namespace=True),
            make_leader_service(family, "controller"),
            *queue_claims(queue, family),
            make_budget(family, roles=[role.name for role in roles], pods=sum(role.core for role in roles)),
        )

    def queue_pod(self, state: TransferQueueState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return a pod of a queue. Raises KeyError if the queue does not have the role."""
        if state.job is not None:
            blueprint = self._of_job(state.job, role, owner=state.owner)
        else:
            blueprint = queue_blueprint(
                _queue(state),
                role,
                family=family_of(state.owner),
                secrets=self.secrets(state.owner),
                registry=self.settings.registry,
            )
        return make_pod(blueprint, index=index, attempt=attempt)

    def sync_supporting(self, state: SyncState) -> tuple[Manifest, ...]:
        """Return all objects except Secrets that a publisher needs, or the manifest for followers of a job."""
        family, sync = family_of(state.owner), _sync(state)
        if sync.spec.publishes is None:
            return (make_config(sync, family, name=f"{family.name}.sync"),)
        return (
            make_account(family),
            make_config(sync, family),
            make_network_policy(family, watchers=self.settings.watchers),
            make_leader_service(family, PUBLISHER),
        )

    def sync_pod(self, state: SyncState, attempt: int) -> Manifest:
        """Return the publisher's pod."""
        blueprint = publisher_blueprint(
            _publisher(state),
            family=family_of(state.owner),
            secrets=self.secrets(state.owner),
            registry=self.settings.registry,
        )
        return make_pod(blueprint, index=0, attempt=attempt)

    def images(self, job: RLJob) -> dict[str, str]:
        """Return the images for a job that starts now, by role and for the reward container; its status pins them."""
        registry = self.settings.registry
        images: dict[str, str] = {
            role.name: image_of(role, templates=templates_of(job, role.name), pinned={}, registry=registry)
            for role in plan(job).roles
        }
        return images | {REWARD_CONTAINER: images["rollout"]}

    def secret(self, owner: Owner, part: SecretPart) -> Manifest:
        """Return a Secret of a job, a queue without a job, or a publisher."""
        return self.secrets(owner).make(family_of(owner), part)

    def secrets(self, owner: Owner) -> OwnerSecrets:
        """Return the secrets of a job, a queue without a job, or a publisher."""
        return OwnerSecrets(owner, self.settings.master)

    def address(self, owner: Owner) -> str:
        """Return the address to which followers connect: that of a job's driver or of a publisher."""
        return leader_address(family_of(owner), "driver" if owner.kind == "RLJob" else PUBLISHER)

    def certificate(self, owner: Owner, role: str) -> str:
        """Return the name of the Secret with the certificate of an external ``role``."""
        return self.secrets(owner).name(role)

    def _of_job(self, state: JobState, role: RoleName, *, owner: Owner) -> Blueprint:
        return job_blueprint(
            _job(state),
            role,
            family=family_of(state.owner).of(owner),
            secrets=self.secrets(state.owner),
            pinned=state.status.images,
            registry=self.settings.registry,
            granted=granted(state, role),
        )

    def _policies(
        self, family: Family, roles: tuple[Role, ...], *, open_to_namespace: bool = False
    ) -> tuple[Manifest, ...]:
        """Return the policies of all pods except the driver."""
        watchers, stores = self.settings.watchers, [role.name for role in roles if role.name in _STORES]
        made = make_network_policy(family, watchers=watchers, stores=stores, open_to_namespace=open_to_namespace)
        return (made, make_store_policy(family, watchers=watchers, stores=stores)) if stores else (made,)

    def _gang(self, state: JobState, roles: tuple[Role, ...]) -> tuple[Manifest, ...]:
        job = _job(state)
        if job.spec.scheduling.gang == "none":
            return ()
        unassigned = replace(state, objects={})
        core = [(role, self.pod(unassigned, role.name, 0, 0)) for role in roles if role.core]
        return make_gang(job, family_of(state.owner), core=core, found=state.found)


def _job(state: JobState) -> RLJob:
    if state.job is None:
        raise ValueError(f"{state.owner.name} is not a valid job: {state.problem}")
    return state.job


def _sync(state: SyncState) -> WeightSync:
    if state.sync is None or state.sync.spec.source is None:
        raise ValueError(f"{state.owner.name} is not a valid WeightSync for followers: {state.problem}")
    return state.sync


def _publisher(state: SyncState) -> WeightSync:
    sync = _sync(state)
    if sync.spec.publishes is None:
        raise ValueError(f"{state.owner.name} publishes no model")
    return sync


def _queue(state: TransferQueueState) -> TransferQueue:
    if state.queue is None:
        raise ValueError(f"{state.owner.name} is not a valid queue: {state.problem}")
    return state.queue
