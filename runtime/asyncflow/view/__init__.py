"""Presentation of a run to a person. Rendering is pure: a ``Frame`` goes in, lines or a rich renderable come out."""
