"""Toxicity and perplexity of steering and its baselines (paper B, section 6.1, Table 5)."""
