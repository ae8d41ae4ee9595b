"""The plan: from a job to the roles that a substrate places. Pure: it opens nothing and asks nothing."""

from asyncflow.plan.job import plan
from asyncflow.plan.roles import JobPlan, Port, Readiness, Resources, RestartPolicy, Role

__all__ = ["JobPlan", "Port", "Readiness", "Resources", "RestartPolicy", "Role", "plan"]
