"""Stages with tensor and data parallel degrees together, from profiles of layers.

profiles   layers with options per tensor parallel degree, and the cost of a plan from its definition
reading    the public JSON format of such profiles
options    the choice of an option for each layer of a stage, within memory
stages     candidate stages, and what they cost at least
search     the plan with the least time per sample, and a bound below it
"""
