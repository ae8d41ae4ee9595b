"""Training: from the rows of D_k to θ_k. Packing, backends, training loops and checkpoints."""
