"""The plan of a job: the roles that a substrate places. It is computed from the manifest alone, without any I/O."""

from asyncflow.plan.job import plan
from asyncflow.plan.roles import JobPlan, Port, Readiness, Resources, RestartPolicy, Role

__all__ = ["JobPlan", "Port", "Readiness", "Resources", "RestartPolicy", "Role", "plan"]
