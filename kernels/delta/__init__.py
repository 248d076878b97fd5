"""Gated DeltaNet: linear attention whose states travel between devices."""
