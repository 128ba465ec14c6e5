"""Plans of models with bounded dimensions: a program for each size of a ladder."""
