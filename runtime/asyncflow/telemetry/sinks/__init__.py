"""Places to which the figures of a run go, beside its own files: TensorBoard, Weights & Biases, MLflow, others'."""
