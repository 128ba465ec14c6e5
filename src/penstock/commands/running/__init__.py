"""Commands that run bundles, and that measure and model runs."""
