"""Storage of cells: back ends behind one small interface, found by the entry points ``asyncflow.storage_backends``."""
