"""The end-to-end test: a real node, the project's images and chart, and a job that trains while its pods are killed.

``python -m e2e`` prints and records each step as it happens: the transcript. Invariant: it exits with 0 only if every
check held, and it always cleans up.
"""
