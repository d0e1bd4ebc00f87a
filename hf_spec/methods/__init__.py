"""Speculative methods, one folder each.

===============  ================  ======================  =============================  =========
strategy         folder            paper                   who drafts                     training
===============  ================  ======================  =============================  =========
none             none.py           -                       no drafting, a baseline        -
lookup           lookup/           arXiv 2304.04487        n-grams of the text            -
draft            draft_model/      arXiv 2211.17192        a draft model, a chain         optional
tree             draft_model/      arXiv 2305.09781        a draft model, a tree          optional
gsd              gsd/              arXiv 2407.16207        a draft model, a graph         optional
disco            disco/            arXiv 2405.04304        a draft model, adaptive length here
pard             pard/             arXiv 2504.18583        a draft model, in one pass     published
gemma_assistant  gemma_assistant/  -                       layers on the target's KV      published
mtp              mtp/              arXiv 2412.19437        the target's MTP layer         either
falcon           falcon/           arXiv 2412.12639        a head on the target's states  here
eagle            eagle/            arXiv 2503.01840        a head on the target's states  either
block            block/            arXiv 2602.06036        a head, a block in one pass    either
heads            medusa/           arXiv 2401.10774        Medusa heads, MLP speculators  either
sdsat            sdsat/            arXiv 2403.18647        the target, adaptive tokens    here
auto             auto/             -                       any of them, by measured speed -
===============  ================  ======================  =============================  =========

Training: "here", `hf-spec train NAME`; "published", weights that others have trained; "either";
"optional", a trained draft model is more accurate, but any model works. `feature_pairs/` holds the
rows of (token, feature) pairs that falcon, eagle and mtp share. `builtin.py` imports every method.
"""
