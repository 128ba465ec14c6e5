"""Styles of torch and other layouts that are given for modules, as layouts of tensors."""
