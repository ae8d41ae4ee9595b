"""AsyncFlow: asynchronous reinforcement-learning post-training. Importing the package loads nothing heavy."""

__version__ = "0.1.0"
