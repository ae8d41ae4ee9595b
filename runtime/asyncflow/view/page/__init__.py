"""The page of a run: one HTML document, and the JSON that it requests from a driver or from ``asyncflow ui``."""
