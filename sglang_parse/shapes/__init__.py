"""Shapes of models without weights, for bench and roofline: ``shape``, and their configs."""
