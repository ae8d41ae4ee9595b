"""A real Kubernetes control plane on this machine, from pinned Go modules: for tests, benchmarks and people.

``build`` makes the binaries, ``ControlPlane`` runs them, ``python -m kube`` is the same by hand. Nothing here knows
AsyncFlow: it is the other side of the wire. Invariant: what a plane starts dies with whoever started it.
"""
