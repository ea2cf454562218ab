"""Train small language models in minutes: text, resumable training, baselines."""
