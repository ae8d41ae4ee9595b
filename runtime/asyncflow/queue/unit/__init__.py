"""A storage unit: byte budget, holdings, and its talk with the controller."""
