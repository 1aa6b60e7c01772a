"""Optimizers: one file each, builders of the graphs that a step ends with (``surogate.compile.groups.Optimizer``)."""
