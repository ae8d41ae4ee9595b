"""The training objective: advantages, losses, KL penalties and aggregation. Formulas only, without I/O or state."""
