"""A step's output written straight into the host's memory."""
