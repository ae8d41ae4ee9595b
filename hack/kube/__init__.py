"""A real Kubernetes control plane on this machine, from pinned Go modules, for tests, benchmarks and manual use.

``build`` builds the binaries, ``ControlPlane`` runs them, and ``python -m kube`` does the same from a shell. The
package does not depend on AsyncFlow's API. Invariant: the processes of a plane end with the process that started it.
"""
