"""Access to the API server: the only package of the operator that reads and writes objects of the cluster."""
