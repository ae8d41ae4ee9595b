"""The planner (AsyncFlow §4.3): predicts the duration of a step on given devices, and the best division of the devices.

A cost model computes the cost of a token, a micro-batch and a transfer on a kind of device (``devices``, ``shapes``,
``costs``). Each division of the devices either becomes a scenario or does not fit (``layouts``). Closed-form bounds
exclude divisions that cannot be the best, and the simulator ranks the rest (``search``). The planner is pure: measured
runs and files are passed in as values.
"""
