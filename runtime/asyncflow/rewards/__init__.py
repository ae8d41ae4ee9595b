"""Rewards: functions that score responses, which run in sandboxed processes with a deadline."""
