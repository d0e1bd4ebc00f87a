"""What several drafters share: graphs, trees of ranks, length policies, lossy rules."""
