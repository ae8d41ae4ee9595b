"""The user-level API: a script or a notebook drives a job or a queue (AsyncFlow, arXiv 2507.01663, §5)."""
