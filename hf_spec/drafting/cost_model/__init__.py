"""Cost model: how long and how wide a draft should be, from measured costs.

In every round it chooses which drafters run, to which depth, and which nodes the target verifies.

- Measured: seconds of the target's forward pass by number of nodes and of each draft by depth
  (`cost_curves`, `round_timer`), and acceptance rates by level and kind of node
  (`acceptance_stats`, `draft_source`). They come from the rounds themselves and are cached on the
  target model.
- Decision rule: the most expected accepted tokens per second (`selection`). A step without a draft
  is one of the options. Reading the prompt with a draft model is a one-time cost, apart from the
  cost of a draft.
- Exploration: a drafter that is not expected to pay is tried again after waits that double
  (`exploration`). What was learned is the prior of later generations.

`cost_model_drafter` has `CostModelDrafter`, for `auto`. `adaptive_length_drafter` has
`AdaptiveLengthDrafter`, for a method whose draft length is not configured.
"""
