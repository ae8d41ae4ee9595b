"""Build OCI images from locally installed files, for tests on a machine without docker and without a network.

An image follows ``images/<name>/Dockerfile`` (variables, user, entry point, extras). Its files come from the running
interpreter and virtual environment: their files, the shared libraries that they link, and the project's own wheel.
Invariant: a program that starts in an image from here starts in the image that docker builds from the same Dockerfile.
"""
