"""The trainer backend ``torch``: models of transformers, AdamW, FSDP2."""
