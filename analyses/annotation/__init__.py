"""Concepts of value vectors, by annotators or by a corpus."""
