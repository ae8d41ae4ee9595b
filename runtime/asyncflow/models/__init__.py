"""Models: their sources, tokenizers and exported folders. torch is imported lazily."""
