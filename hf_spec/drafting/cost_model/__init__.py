"""Cost model: how long and how wide a draft should be, from measured costs.

In every round it chooses which drafters run, to which depth, and which nodes the target verifies.

- Measured: seconds of the target's forward pass by number of nodes and of each draft by depth
  (`cost_curves`), and acceptance rates by level and kind of node (`acceptance_stats`). They come
  from the rounds themselves (`round_timer`) and are cached on the target model.
- Decision rule: the most expected accepted tokens per second (`selection`). A step without a draft
  is one of the options, so nothing is drafted where no draft pays.
- Exploration: initial cost estimates are low, and the rates of a drafter that does not run fade
  towards their prior, so it is tried again.
- Loss budget: a generation of T tokens loses at most about 1 + 0.01 T plain steps on drafts that
  fail (`selection`).

`cost_model_drafter` puts this together: `CostModelDrafter` for `auto`, and `AdaptiveLengthDrafter`
for a method whose draft length is not configured.
"""
