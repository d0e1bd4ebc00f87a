"""The decoding loop, its state, the contract of a drafter, verification; it knows no method."""
