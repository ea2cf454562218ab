"""Figures that only analyses draw."""
