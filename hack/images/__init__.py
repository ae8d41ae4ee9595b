"""OCI images from what is installed here, with no docker and no network: for tests, on a machine that has neither.

An image is what ``images/<name>/Dockerfile`` says (variables, user, entry point, extras), filled from the interpreter
and the virtual environment that run this: their files, the shared libraries that those link, our own wheel. Invariant:
what starts in an image here starts in the one that docker would make of the same Dockerfile.
"""
