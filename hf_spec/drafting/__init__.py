"""Drafting code shared by methods.

- Configs and length policies: `config`, `length_policy`.
- Growing a draft: `level_drafter` (a forward pass per level), `one_pass_drafter`, `tree_growth` on
  the host, `device_growth` on the device (passes of `pass_plans`), `token_graph` (merging),
  `rank_tree` (fixed shapes).
- `cost_model/`: how long and how wide a draft should be.
- `lossy_rules`: the published sampling rules of SDSAT and GSD.
"""
