"""The whole thing, end to end: a real node, our images, our chart, a job that trains while its pods are killed.

``python -m e2e`` is a story that is told as it happens, and its words are the transcript. Invariant: it ends with 0
only if every check held, and leaves nothing behind either way.
"""
