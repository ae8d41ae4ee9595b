"""Which image a role runs."""

import pytest

from asyncflow.api.placement import TemplateSpec
from asyncflow.plan import plan
from asyncflow_operator.desired.blueprint import Registry, image_of

CUSTOM_KINDS = Registry(prefix="registry.example:5000/asyncflow", tag="1.3.0")
OWN = "registry.example:5000/asyncflow/runtime-cpu:1.3.0"
PIN = "registry.example:5000/asyncflow/runtime-cpu:1.2.3"
DIGEST = "mirror/runtime-cpu@sha256:0123"


@pytest.mark.parametrize(
    ("templates", "pinned", "expected"),
    [
        ((), {}, OWN),
        ((), {"trainer": PIN}, PIN),
        ((), {"trainer": DIGEST}, DIGEST),
        ((), {"rollout": PIN}, OWN),
        ((), {"trainer": "registry.example/runtime-cuda:1.2.3"}, OWN),
        ((), {"trainer": "mine:1"}, OWN),
        (("job:1",), {"trainer": PIN}, "job:1"),
        (("job:1", "role:2"), {}, "role:2"),
        (("job:1", None), {}, "job:1"),
    ],
)
def test_the_users_image_wins_then_the_pinned_then_the_operators(job_state, templates, pinned, expected):
    role = plan(job_state().job).role("trainer")
    said = [TemplateSpec(image=image) for image in templates]
    assert image_of(role, templates=said, pinned=pinned, registry=CUSTOM_KINDS) == expected


def test_without_a_registry_an_image_has_its_name_alone():
    assert Registry(prefix="", tag="1").image("runtime-cpu") == "runtime-cpu:1"
