"""Models: where they come from, their tokenizers, and the folders they are written to. torch is imported lazily."""
