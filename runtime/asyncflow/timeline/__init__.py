"""Accounting of the time of a run: tracks of spans, the cause of each idle second, and a trace of them."""
