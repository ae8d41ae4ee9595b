"""Sinks for the figures of a run, in addition to its files: TensorBoard, Weights & Biases, MLflow, third-party ones."""
