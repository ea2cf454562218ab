"""Early exit by sub-updates, classifiers and others (paper B, section 6.2, Table 6)."""
