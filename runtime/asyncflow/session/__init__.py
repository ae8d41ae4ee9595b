"""The user-level API: a job, or a queue, driven from a script or a notebook (AsyncFlow, arXiv 2507.01663, §5)."""
