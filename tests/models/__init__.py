"""Model families of torch and transformers."""
