"""Small changes to the verifier and to the schedules, each of which a test must notice."""
