"""Presentation of a run to the user. Rendering is pure: it turns a ``Frame`` into lines or a rich renderable."""
