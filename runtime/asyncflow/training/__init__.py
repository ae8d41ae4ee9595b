"""From rows of D_k to θ_k: packing, backends, the loops, checkpoints."""
