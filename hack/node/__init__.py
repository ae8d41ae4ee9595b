"""A real Kubernetes node on this machine: kubelet, containerd, CNI, kube-proxy and CoreDNS, with the control plane of
``kube``. Start it with ``python -m node up`` from a shell, or with ``Node`` from a program.

It needs root, cgroup v1 and a few Debian packages (``machine.PACKAGES``). Invariant: all processes, mounts, routes and
sockets of a node end with the init process of its namespaces. To end the node, that process is killed.
"""
