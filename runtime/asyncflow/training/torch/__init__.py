"""The trainer backend ``torch``: models of transformers, AdamW and FSDP2."""
