"""When a draft is worth its time: measured costs and acceptance rates."""
