"""Plans of decoders: models that generate text, and what their bundles know about text."""
