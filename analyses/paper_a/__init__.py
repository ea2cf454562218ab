"""Shared by scripts of paper A: replaced sub-modules and predictions of layers."""
