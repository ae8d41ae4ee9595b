"""Rewards: somebody else's code, run in killable processes with a deadline."""
