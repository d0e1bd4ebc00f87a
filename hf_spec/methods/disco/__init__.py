"""DISCO: a trained classifier decides after every draft token whether drafting goes on.

Mamou et al. 2024, "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language
Models", arXiv 2405.04304. In every round, for each row:

1. The draft model drafts one token from its distribution q.
2. The classifier C (a two-layer network, section 3) predicts from q whether the target accepts it.
3. The row stops if C < tau or after SL_max tokens; the token that triggers the stop is kept.
4. The target verifies the chain. C never reads the target, so rejection sampling stays exact.

Features: the ten largest probabilities, the entropy, and the position of the token. Training data
(appendix D.1): at every position of the target's own answers, whether the draft model predicts the
target's token. tau and SL_max are calibrated on latency.

Left open by the paper, chosen here: width 32, ReLU, standardized features, entropy of the whole
distribution, log(1 + position) counted from the start of the generation, class weights, AdamW.
Differences: soft labels 1 - TV(p, q) are an option; the default policy compares C with the measured
cost of another token instead of tau; the same classifier can stop trees and graphs
(`length_policy="disco"`).

Calibration is in `hf_spec.evaluation.bench.calibrate.disco`.
"""
