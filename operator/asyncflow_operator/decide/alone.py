"""Pods of what stands alone, with everything that they need: of a queue without a job, of a publisher.

Invariant: no pod is made before its Secrets and the objects that it refers to; what somebody has changed of these is
put back, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from asyncflow.api.queue import QueueStatus
from asyncflow.api.weights import WeightsStatus
from asyncflow.plan.roles import Role
from asyncflow_operator.decide.draft import Draft
from asyncflow_operator.decide.replicas import PodReplica
from asyncflow_operator.decide.secrets import DesiredSecrets, secret_upkeep
from asyncflow_operator.decide.upkeep import Upkeep, restore_notes, with_needs
from asyncflow_operator.observed import Denial, Manifest, PodView


def make_alone(
    draft: Draft[QueueStatus] | Draft[WeightsStatus],
    made: Iterable[PodReplica],
    *,
    pod: Callable[[PodReplica], Manifest],
    roles: Sequence[Role],
    people: Sequence[str],
    pods: Collection[PodView],
    supporting: Upkeep,
    denied: Collection[Denial],
    desired: DesiredSecrets,
) -> None:
    """Make pods, and write what all pods need.

    made, pod: which, and the manifest of each; people: roles of people who get a certificate; pods: those that are
    there; supporting: what is to be written beside Secrets; denied: what the API server has refused.
    """
    made = tuple(made)
    secrets = secret_upkeep(
        draft.owner,
        roles,
        people=people,
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
    draft.add_then(with_needs(map(pod, made), {**supporting.absent, **secrets.needed}))
