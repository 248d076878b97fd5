"""Names chips, and puts the devices of a mesh into rings over their links."""
