"""Storage of cells: backends behind one small interface, found by the entry points ``asyncflow.storage_backends``."""
