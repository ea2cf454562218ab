"""WikiLM: adaptive softmax, fairseq checkpoints, and a TransformerLens adapter."""
