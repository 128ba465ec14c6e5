"""Commands that make plans and bundles, and take weights out of them."""
