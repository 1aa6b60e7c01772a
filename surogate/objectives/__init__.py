"""Objectives: what a step computes from a batch, written in the same DSL as the models."""
