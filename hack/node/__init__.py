"""A real Kubernetes node on this machine: kubelet, containerd, CNI, kube-proxy and CoreDNS beside ``kube``'s control
plane. ``python -m node up`` for people, ``Node`` for programs.

Needs root, cgroup v1 and a few Debian packages (``machine.PACKAGES``). Invariant: what a node starts ends with the init
process of its own namespaces, and with it what it mounted, routed and listened on; killing it is the way to end it.
"""
