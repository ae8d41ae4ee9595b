"""Tasks as roles of their own: rows are claimed, computed by a user's function or a model, and written."""
