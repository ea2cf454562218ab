"""WikiLM: adaptive input and softmax, fairseq checkpoints and dictionaries, the TransformerLens adapter."""
