"""The API server and the pods' services: the only place of the operator that does I/O on the cluster."""
