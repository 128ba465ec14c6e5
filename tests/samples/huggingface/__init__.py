"""Folders of Hugging Face with small models of random weights."""
