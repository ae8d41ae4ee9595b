"""Pods of a queue without a job or of a publisher, with the Secrets and objects that they need.

Invariants: no pod is created before its Secrets and the objects that it refers to. Foreign changes of these objects are
reverted, with an event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from asyncflow.api.queue import QueueStatus
from asyncflow.api.weights import WeightsStatus
from asyncflow.plan.roles import Role
from asyncflow_operator.decide.draft import Draft
from asyncflow_operator.decide.replicas import PodReplica
from asyncflow_operator.decide.secrets import DesiredSecrets, certified, secret_upkeep
from asyncflow_operator.decide.upkeep import Upkeep, restore_notes, with_needs
from asyncflow_operator.observed import Denial, Manifest, PodView


def make_alone(
    draft: Draft[QueueStatus] | Draft[WeightsStatus],
    made: Iterable[PodReplica],
    *,
    pod: Callable[[PodReplica], Manifest],
    roles: Sequence[Role],
    external_roles: Sequence[str],
    pods: Collection[PodView],
    supporting: Upkeep,
    denied: Collection[Denial],
    desired: DesiredSecrets,
) -> None:
    """Add the creation of pods, and the writes of the objects that all pods need, to the draft.

    made, pod: the replicas to create, and a function that returns the manifest of each. external_roles: roles outside
    the pods that get a certificate. supporting: required writes of objects other than Secrets.
    """
    made = tuple(made)
    secrets = secret_upkeep(
        draft.owner,
        roles,
        external_roles=external_roles,
        pods=pods,
        made=made,
        records=draft.before.secrets,
        desired=desired,
        alarm=draft.alarm,
    )
    draft.keep_secrets(secrets)
    draft.add_first(supporting.write)
    owner = f"{draft.owner.kind} {draft.owner.name}"
    draft.notes.extend(restore_notes(supporting.changed, denied, owner=owner))
    ready = certified(draft.owner, made, records=secrets.records, now=draft.now)
    draft.add_then(with_needs(map(pod, ready), {**supporting.absent, **secrets.needed}))
