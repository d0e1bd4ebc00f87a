"""Training of drafters on the target's own answers: data, a loop, and one script a method."""
