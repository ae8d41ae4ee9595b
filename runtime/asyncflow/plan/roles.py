"""Description of a role: how many processes, the command line of each, and what a substrate must provide.

Invariant: a role says everything that a substrate needs and nothing that only one substrate knows: no address, no path,
no process and no pod. What only the substrate knows is given to ``command``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from asyncflow.api.graph import JobGraph
from asyncflow.api.names import RoleName

REFUSED: Final = 2
"""Exit status of a process that refuses its input (manifest, checkpoint, ledger): another attempt would end so, too."""
DISRUPTED: Final = 3
"""Exit status of a process that lost what it worked on because another process ended. It begins again, and that is no
failure of its role."""
MOST_DISRUPTIONS: Final = 100
"""Most ends of that kind within the window of a role's restarts, so that it does not begin again for ever."""

Durable = Literal["driver", "ledger", "checkpoints"]


@dataclass(frozen=True, kw_only=True)
class Port:
    """A listening TCP port of a process that has an address of its own; on a shared address any free port will do."""

    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """A process is ready when ``GET path`` at the port named ``port`` answers 200, ``within_s`` after its start."""

    path: str
    port: str
    within_s: float


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Restart budget of a role, over all its processes; for a gang one restart is one.

    max_restarts: within ``window_s`` seconds; backoff_s: seconds before the first, doubled by each in a row.
    dismissed_s: seconds within which a leader that ordered a process to end has ended too; after them the process
    starts again, which is no failure.
    """

    max_restarts: int
    window_s: float
    backoff_s: float
    dismissed_s: float


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that one process needs.

    cpu: cores; memory: bytes, None = unstated; accelerators: devices of ``resource``; share: part of each that it uses.
    """

    cpu: float
    memory: int | None = None
    shared_memory: int | None = None
    profile: str = "cpu"
    resource: str = ""
    accelerators: int = 0
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Role:
    """One role of a job.

    replicas: processes, of which ``core`` must find a place together with the other roles' cores; elastic: whether
    ``replicas`` may change between ``core`` and ``most`` while the job runs. gang: whether the processes start and end
    together; exchanges: whether they compute together although each starts and ends on its own; ranks: members of the
    job that each stands for, which it starts itself where they are several. leader: whether its exit with status 0 ends
    the job well. after: roles to be ready before it starts.
    durable: volumes that it needs. env: beside what the substrate adds. imports: modules beside those of all roles
    whose import takes most of the time until it is ready.
    """

    name: RoleName
    replicas: int
    core: int
    most: int
    resources: Resources
    readiness: Readiness
    restart: RestartPolicy
    gang: bool = False
    exchanges: bool = False
    ranks: int = 1
    leader: bool = False
    after: tuple[RoleName, ...] = ()
    durable: tuple[Durable, ...] = ()
    ports: tuple[Port, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    imports: tuple[str, ...] = ()

    @property
    def elastic(self) -> bool:
        """True where the number of processes may change while the job runs."""
        return self.core != self.most

    @property
    def linked(self) -> bool:
        """True where several processes exchange tensors over a network, each by devices of its own."""
        return (self.gang or self.exchanges) and self.replicas > 1

    @property
    def spread(self) -> bool:
        """True where several processes compute together, over a network."""
        return self.gang and self.replicas > 1

    @property
    def world(self) -> int:
        """Ranks that compute together, 1 where the role is no gang."""
        return self.replicas * self.ranks if self.gang else 1

    def rank_variables(self, index: int, *, local_rank: int = 0) -> dict[str, str]:
        """Return the variables by which torchrun tells a rank of process ``index`` which one it is."""
        return {
            "WORLD_SIZE": str(self.world),
            "RANK": str(index * self.ranks + local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(index),
        }

    def command(
        self,
        *,
        index: int,
        attempt: int,
        driver: str,
        job: str,
        workdir: str,
        http_port: int | None = None,
        control_port: int | None = None,
        python: str = "python",
    ) -> list[str]:
        """Return the command line of process ``index``.

        attempt: counts from 0, grows with every restart; driver: the driver's address, for the driver itself the one
        to listen on; job: path of the manifest; workdir: where the process may write; http_port: where /metrics is
        served, any free port if None; control_port: where the driver takes orders, likewise; python: the interpreter.
        Raises ValueError for a negative index.
        """
        if index < 0:
            raise ValueError(f"process {index} of role {self.name}")
        options = {"job": job, "driver": driver, "index": index, "attempt": attempt, "workdir": workdir}
        if http_port is not None:
            options["http-port"] = http_port
        if control_port is not None:
            options["control-port"] = control_port
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [python, "-m", "asyncflow", "role", self.name, *words]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The roles of a job in the order in which they start, and the tasks that they run."""

    job: str
    roles: tuple[Role, ...]
    graph: JobGraph

    def role(self, name: RoleName) -> Role:
        """Return a role by name. Raises KeyError where the job has none of it."""
        return {role.name: role for role in self.roles}[name]
