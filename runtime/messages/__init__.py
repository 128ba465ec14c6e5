"""The messages between a job and its workers, and what they say of state and memory."""
