"""The manifest as pods read it: what the spec says, without what the API server and the operator add to an object.

Written as JSON, which is YAML too and is made in a fraction of the time. What has its default value is left out, so
that a job that began with an older image can read what a newer operator wrote: no field is there that it does not know.

Invariant: it changes only when the spec does, and a job that is suspended has the same manifest as one that runs.
"""

from __future__ import annotations

import json
import re
from typing import Final

from asyncflow.api.base import Spec
from asyncflow.api.job import RLJob
from asyncflow.api.names import JOB_FILE, REWARD_FILE
from asyncflow.api.queue import TransferQueue
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest

_BREAKS: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
"""Characters that JSON leaves as they are and YAML takes for line breaks, or refuses."""


def make_config(manifest: RLJob | TransferQueue, family: Family) -> Manifest:
    """Return the ConfigMap with the manifest, and with a job's ``spec.reward`` alone, for the container that scores."""
    data = {_key(JOB_FILE): _text(_whole(manifest, family))}
    if isinstance(manifest, RLJob):
        data[_key(REWARD_FILE)] = _text(_stated(manifest.spec.reward))
    return stamped(make_object("v1", "ConfigMap", family, name=family.name, body={"data": data}))


def _whole(manifest: RLJob | TransferQueue, family: Family) -> Manifest:
    spec = _stated(manifest.spec)
    spec.pop("suspend", None)
    metadata = {"name": family.name, "namespace": family.namespace, "uid": family.owner.uid}
    return {"apiVersion": manifest.api_version, "kind": manifest.kind, "metadata": metadata, "spec": spec}


def _stated(spec: Spec) -> Manifest:
    return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)


def _key(path: str) -> str:
    return path.rpartition("/")[2]


def _text(data: Manifest) -> str:
    text = json.dumps(data, ensure_ascii=False, indent=1)
    return _BREAKS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
