"""Rewards: user code that scores responses, run in sandboxed processes with a deadline."""
