"""A local control plane: etcd and kube-apiserver, and optionally the controllers, the scheduler and KWOK.

    with ControlPlane(with_=("kcm", "sched", "kwok")) as plane:
        plane.add_nodes(20)
        plane.kubectl("get", "nodes")

Without ``kcm`` nothing is garbage-collected, and a deleted namespace stays, so tests use a new name. Invariant: after
``start`` every server answers. After ``stop``, or the end of this process, no server runs; ``stop`` removes the state.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from kube import audit, nodes, servers
from kube.build import Say, binary
from kube.folder import Folder
from kube.pki import Authority
from kube.process import PlaneError, Process, wait_until
from kube.rest import Api

Component = Literal["kcm", "sched", "kwok"]

_ATTEMPTS: Final = 3
_RARELY: Final = {"GOGC": "400"}
"""Less frequent garbage collection in Go, which saves a quarter of the API server's CPU time for 300 MB of memory."""
_OK: Final = 200
_PORT_TAKEN: Final = "address already in use"
_DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_ACCOUNT: Final = "/api/v1/namespaces/default/serviceaccounts/default"


class KubectlError(PlaneError):
    """kubectl ended with an error. code: its exit status; said: its output on stderr."""

    def __init__(self, arguments: Sequence[str], code: int, said: str) -> None:
        super().__init__(f"`kubectl {' '.join(arguments)}` ended with {code}: {said.strip()}")
        self.code = code
        self.said = said


class ControlPlane:
    """A control plane: it starts and ends the servers, and creates clients for them.

    with_: components in addition to etcd and the API server; audited: record every request; name: the name of its
    folder, by which other processes find it, by default a unique one; address: the address of this machine at which a
    kubelet reaches the API server; apiserver_flags: additional flags; say: receives messages about builds.
    """

    def __init__(
        self,
        *,
        with_: Collection[Component] = (),
        audited: bool = False,
        name: str | None = None,
        address: str = servers.LOOPBACK,
        apiserver_flags: Sequence[str] = (),
        say: Say = lambda _: None,
    ) -> None:
        self.with_ = frozenset(with_)
        self._audited = audited
        self._name = name
        self._address = address
        self._flags = tuple(apiserver_flags)
        self._say = say
        self._folder: Folder | None = None
        self._site: servers.Site | None = None
        self._processes: dict[str, Process] = {}
        self._others: list[Process] = []
        self._apis: dict[tuple[str, tuple[str, ...]], Api] = {}
        self._serial = itertools.count()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, timeout_s: float = 90.0) -> None:
        """Start the servers and wait until they answer. Raises PlaneError or BuildError, after cleaning up."""
        for needed in ("etcd", "kube-apiserver", "kubectl", *(["kwok"] if "kwok" in self.with_ else [])):
            binary(needed, say=self._say)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._start(timeout_s)
            except BaseException as error:
                self.stop()
                if attempt == _ATTEMPTS or not isinstance(error, PlaneError) or _PORT_TAKEN not in str(error):
                    raise
            else:
                return

    def stop(self) -> None:
        """End the servers in reverse order of their start, and remove their state."""
        for process in reversed(self._processes.values()):
            process.end()
        if self._folder is not None:
            self._folder.remove()
        self._folder = self._site = None
        self._processes.clear()
        self._others.clear()
        self._apis.clear()

    @property
    def url(self) -> str:
        """The address of the API server."""
        return self._where.url

    @property
    def folder(self) -> Path:
        """The folder with logs, keys and state, removed by ``stop``."""
        return self._where.folder

    @property
    def admin(self) -> Path:
        """The kubeconfig of the administrator."""
        return self.folder / "pki" / "admin.kubeconfig"

    @property
    def api(self) -> Api:
        """The client for JSON requests as the administrator."""
        return self.api_of("admin", "system:masters")

    def kubeconfig(self, user: str, *groups: str) -> Path:
        """Return a kubeconfig that authenticates as ``user`` in ``groups``, so that RBAC applies."""
        return self._where.kubeconfig(self._file_of(user, groups), user=user, groups=groups)

    def service_account(self, namespace: str, name: str) -> Path:
        """Return a kubeconfig that authenticates as this service account, which need not exist."""
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
        return self.kubeconfig(f"system:serviceaccount:{namespace}:{name}", *groups)

    def api_of(self, user: str, *groups: str) -> Api:
        """Return the client for JSON requests as ``user`` in ``groups``."""
        if (user, groups) not in self._apis:
            authority = self._where.authority
            certificate, key = authority.client(f"{self._file_of(user, groups)}.api", user=user, groups=groups)
            self._apis[user, groups] = Api(self.url, ca=authority.ca, certificate=certificate, key=key)
        return self._apis[user, groups]

    def kubectl(
        self,
        *arguments: str,
        manifest: str | Mapping[str, Any] | None = None,
        kubeconfig: Path | None = None,
        timeout_s: float = 60.0,
    ) -> str:
        """Run kubectl and return its output. Raises KubectlError.

        manifest: its standard input, for ``-f -``; kubeconfig: of its user, by default the administrator.
        """
        text = manifest if isinstance(manifest, str) or manifest is None else json.dumps(manifest)
        result = subprocess.run(
            [binary("kubectl"), *arguments],
            input=text or "",
            env=os.environ | {"KUBECONFIG": str(kubeconfig or self.admin), "KUBECACHEDIR": str(self.folder / "cache")},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if result.returncode != 0:
            raise KubectlError(arguments, result.returncode, result.stderr)
        return result.stdout

    def install_crds(self, folder: Path) -> None:
        """Apply the CustomResourceDefinitions in ``folder`` with kubectl and wait until they are served."""
        self.kubectl("apply", "-f", str(folder))
        self.wait_until(self._every_definition_is_served, f"the resources of {folder} to be served")

    def add_nodes(
        self,
        count: int,
        *,
        resource: str = "huawei.com/Ascend910",
        each: int = 16,
        labels: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> list[str]:
        """Add fake nodes with ``each`` of ``resource``, wait until they are Ready, and return their names."""
        numbers = list(itertools.islice(self._serial, count))
        names = [f"node-{number}" for number in numbers]
        for name, number in zip(names, numbers, strict=True):
            node = nodes.fake_node(name, number, resource=resource, count=each, labels=labels or {})
            self.api.create(nodes.NODES, node)
        self.wait_until(lambda: nodes.ready(self.api) >= set(names), f"{count} nodes to be Ready", timeout_s=timeout_s)
        return names

    def lose_node(self, name: str) -> None:
        """Make a fake node stop answering: it is tainted, and its pods are not Ready and cannot be deleted."""
        nodes.set_lost(self.api, name, lost=True)

    def return_node(self, name: str) -> None:
        """Bring a lost node back with its pods."""
        nodes.set_lost(self.api, name, lost=False)

    def requests(self, *, user: str | None = None) -> list[audit.Request]:
        """Return the requests so far, of all users or of one; needs ``audited``."""
        if not self._audited:
            raise PlaneError("this control plane records no requests: create it with audited=True")
        return audit.read(self._where.audit_log, user=user)

    def process(self, name: str) -> Process:
        """Return a server by its name: etcd, apiserver, kcm, sched or kwok."""
        return self._processes[name]

    def restart(self, name: str, *, timeout_s: float = 60.0) -> None:
        """End a server and start it again with the stored state, as an upgrade of the control plane does."""
        self._processes[name].end()
        self._processes[name].start()
        self.wait_until(self._is_ready, "the API server to be ready", timeout_s=timeout_s)

    def rely_on(self, process: Process) -> None:
        """Make every wait fail if this process ends by itself; after ``Process.end`` waits continue."""
        self._others.append(process)

    def wait_until(self, condition: Callable[[], object], what: str, *, timeout_s: float = 60.0) -> None:
        """Wait until ``condition`` holds. Raises PlaneError at the deadline, or immediately if a server ended."""
        wait_until(condition, what, timeout_s=timeout_s, needs=[*self._processes.values(), *self._others])

    @property
    def _where(self) -> servers.Site:
        if self._site is None:
            raise PlaneError("the control plane is not running")
        return self._site

    def _start(self, timeout_s: float) -> None:
        self._folder = Folder.fresh() if self._name is None else Folder.named(self._name)
        folder = self._folder.path
        (folder / "log").mkdir()
        etcd_port, peer_port, port, kwok_port = servers.free_ports(4)
        self._site = servers.Site(
            folder=folder,
            address=self._address,
            authority=Authority(folder / "pki"),
            etcd_port=etcd_port,
            peer_port=peer_port,
            port=port,
            kwok_port=kwok_port,
            audit=self._audited,
            pods_need_accounts="kcm" in self.with_,
            extra=self._flags,
        )
        self._site.kubeconfig("admin", user="admin", groups=("system:masters",))
        self._launch("etcd", servers.etcd)
        self._launch("apiserver", servers.apiserver)
        self.wait_until(self._is_ready, "the API server to be ready", timeout_s=timeout_s)
        for name, command in servers.OPTIONAL.items():
            if name in self.with_:
                self._launch(name, command)
        if "kcm" in self.with_:
            self.wait_until(lambda: self.api.exists(_ACCOUNT), "the controllers to start", timeout_s=timeout_s)

    def _launch(self, name: str, command: Callable[[servers.Site], servers.Command]) -> None:
        process = Process(name, command(self._where), log=self.folder / "log" / name, env=_RARELY)
        self._processes[name] = process
        process.start()

    def _is_ready(self) -> bool:
        try:
            return self.api.raw("GET", "/readyz", timeout_s=5.0) == (_OK, b"ok")
        except OSError:
            return False

    def _every_definition_is_served(self) -> bool:
        """Return whether the definitions are established and, shortly afterwards, in OpenAPI and in discovery."""
        definitions = self.api.get(_DEFINITIONS)["items"]
        for definition in definitions:
            held = {(each["type"], each["status"]) for each in (definition.get("status") or {}).get("conditions") or ()}
            if ("Established", "True") not in held:
                return False
            spec = definition["spec"]
            for version in spec["versions"]:
                served = f"/apis/{spec['group']}/{version['name']}"
                _, document = self.api.raw("GET", f"/openapi/v3{served}")
                listing = f"{served}/{spec['names']['plural']}"
                if listing.encode() not in document or self.api.raw("GET", listing)[0] != _OK:
                    return False
        known = self.kubectl("api-resources", "--cached=false", "--output=name").split()
        return all(definition["metadata"]["name"] in known for definition in definitions)

    @staticmethod
    def _file_of(user: str, groups: Collection[str]) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", "-".join((user, *groups)))
