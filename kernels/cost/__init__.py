"""Counts a ring's work, and estimates its seconds by known chips: nothing is run."""
