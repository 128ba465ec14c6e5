"""Judges, generators and small models that tests of several folders share. No tests are here."""
