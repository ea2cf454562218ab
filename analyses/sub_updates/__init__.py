"""Extreme sub-updates and their clusters of value vectors (paper B, section 5.2)."""
