"""Weights: immutable versions that a trainer publishes and every rollout pulls for itself."""
