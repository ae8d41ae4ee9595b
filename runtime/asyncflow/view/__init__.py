"""What a person sees of a run. Rendering is pure: a ``Frame`` goes in, lines or a rich renderable come out."""
