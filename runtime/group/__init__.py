"""The ranks of one run: who they are, how they meet, and whom they trust."""
