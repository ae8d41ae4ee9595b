"""The planner (AsyncFlow §4.3): how long a step of a job takes on given devices, and how to divide them.

A cost model says what a token, a micro-batch and a transfer cost on a kind of device (``devices``, ``shapes``,
``costs``); a division of the devices makes of that a scenario, or does not fit (``layouts``); bounds in closed form
leave out what cannot be the best, and the simulator ranks the rest (``search``). Pure: measured runs and files come in
as values.
"""
