"""Text from a decoder: prompts become sequences, sequences share turns, and chosen tokens become pieces of text."""
