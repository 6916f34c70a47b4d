"""Where the ranks of a job run, and what that means for the network."""
