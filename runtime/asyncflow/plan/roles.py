"""Description of a role: the number of its processes, their command lines, and their requirements on a substrate.

Invariant: a role contains all that a substrate needs to run it, but nothing that depends on the substrate: no address,
path, process or pod. The substrate passes these values to ``command``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from asyncflow.api.graph import JobGraph
from asyncflow.api.names import RoleName

REFUSED: Final = 2
"""Exit status of a process that refuses its input (manifest, checkpoint, ledger). A restart would end the same way."""
DISRUPTED: Final = 3
"""Exit status of a process that lost its work because another process ended. It is restarted, and the restart does not
count as a failure of its role."""
MOST_DISRUPTIONS: Final = 100
"""Most exits with ``DISRUPTED`` within the window of a role's restarts, so that it is not restarted forever."""

Durable = Literal["driver", "ledger", "checkpoints"]


@dataclass(frozen=True, kw_only=True)
class Port:
    """A listening TCP port of a process with an address of its own; on a shared address it uses any free port."""

    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Readiness check: ``GET path`` at the port named ``port`` must return 200 within ``within_s`` of the start."""

    path: str
    port: str
    within_s: float


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Restart budget of a role, over all its processes; a restart of a whole gang counts once.

    max_restarts: most restarts within ``window_s`` seconds; backoff_s: seconds before the first restart, doubled by
    each consecutive one. dismissed_s: seconds in which a leader ends after it ordered a process to end; if the leader
    still runs after them, the process is restarted, which does not count as a failure.
    """

    max_restarts: int
    window_s: float
    backoff_s: float
    dismissed_s: float


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that one process needs.

    cpu: cores; memory, shared_memory: bytes, None if not stated; accelerators: devices of ``resource``; share: the part
    of each device that the process uses.
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

    replicas: number of processes, which may change between ``core`` and ``most`` while the job runs; core: processes
    that must be placed together with the cores of the other roles. gang: whether the processes start and end together;
    exchanges: whether they compute together although each starts and ends independently; ranks: ranks of each process,
    which it starts itself if there are several. leader: whether its exit with status 0 completes the job. after: roles
    that must be ready before it starts. durable: volumes that it needs. env: environment variables, to which the
    substrate adds its own. imports: slow imports of this role, in addition to the modules that all roles import.
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
        """True if the number of processes may change while the job runs."""
        return self.core != self.most

    @property
    def linked(self) -> bool:
        """True if several processes exchange tensors over a network, each with devices of its own."""
        return (self.gang or self.exchanges) and self.replicas > 1

    @property
    def spread(self) -> bool:
        """True if several processes form one gang, which computes together over a network."""
        return self.gang and self.replicas > 1

    @property
    def world(self) -> int:
        """Ranks that compute together; 1 if the role is not a gang."""
        return self.replicas * self.ranks if self.gang else 1

    def rank_variables(self, index: int, *, local_rank: int = 0) -> dict[str, str]:
        """Return the environment variables of a rank of process ``index``, with the names that torchrun uses."""
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

        attempt: counts from 0 and increases with every restart; driver: the driver's address, for the driver itself the
        address to listen on; job: path of the manifest; workdir: folder to which the process may write; http_port: port
        of /metrics, None for any free port; control_port: port of the driver's control service, likewise; python: the
        interpreter. Raises ValueError for a negative index.
        """
        if index < 0:
            raise ValueError(f"process {index} of role {self.name}: the index is negative")
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
        """Return a role by name. Raises KeyError if the job has no such role."""
        return {role.name: role for role in self.roles}[name]
