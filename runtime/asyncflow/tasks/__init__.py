"""Tasks as roles of their own: they claim rows, compute them by a user's function or a model, and write the results."""
