"""Statements of the notes that nothing here measures, listed so that none is passed over."""

from __future__ import annotations

from attnbench.claims.claim import BASICS, CHAPTER, SCRATCH, unmeasured

TRAINED = "needs a trained model"
HISTORY = "a fact about published models, not a measurement"

unmeasured(
    "multi-head-perplexity",
    BASICS,
    "Why Use Multi-Head?",
    "multi-head attention lowers the perplexity of translation by about 20 %",
    why=TRAINED,
    undecided=True,
)
unmeasured(
    "multi-head-robust",
    BASICS,
    "Why Use Multi-Head?",
    "several heads keep a model from overfitting the noise of one",
    why=TRAINED,
    undecided=True,
)
unmeasured(
    "rope-perplexity",
    BASICS,
    "Experimental Results",
    "with RoPE the perplexity falls from 144 to 97",
    why=f"{TRAINED}; no model or data is named",
    undecided=True,
)
unmeasured(
    "rope-extrapolates",
    CHAPTER,
    "4. Key Properties and Advantages",
    "RoPE can handle positions beyond the training length more gracefully",
    why=TRAINED,
    undecided=True,
)
unmeasured(
    "rope-users",
    CHAPTER,
    "1. Motivation for Positional Embeddings",
    "RoPE was popularized in models like GPT-3 and LLaMA",
    why=HISTORY,
    wrong="LLaMA, GPT-J and GPT-NeoX use it; GPT-3 (arXiv:2005.14165, May 2020) is older than RoPE"
    " (arXiv:2104.09864, April 2021) and keeps GPT-2's learned absolute positions",
)
unmeasured(
    "combined-users",
    BASICS,
    "Parameter Initialization Deep Dive",
    "modern transformers such as GPT-2 combine q, k and v; separate matrices are the older way",
    why=HISTORY,
    misleading="GPT-2 does, but separate matrices are no older way: Llama, which is younger, has"
    " them (see the note on LlamaAttention)",
)
unmeasured(
    "relative-bias",
    CHAPTER,
    "6. Relation to Other Position Encoding Methods",
    "relative positions after Shaw et al. often add a bias to the logits",
    why=HISTORY,
    misleading="Shaw et al. add learned vectors to keys and values; scalar biases on logits came"
    " later, with T5 and ALiBi",
)
unmeasured(
    "mixed-precision",
    BASICS,
    "5. Scaled Dot-Product Attention Core",
    "scaled_dot_product_attention supports mixed precision by itself",
    why="a documented behaviour, not a cost",
    misleading="its output has the dtype of its inputs; torch.autocast is what chooses that",
)
unmeasured(
    "heads-specialise",
    SCRATCH,
    "Why Multiple Heads?",
    "heads take on subjects, objects or causes, which a single head would average",
    why=TRAINED,
    undecided=True,
)
unmeasured(
    "weights-explain",
    SCRATCH,
    "3. Interpretability",
    "weights of 0.7 on 'animal' show that the model resolved the pronoun",
    why=TRAINED,
    undecided=True,
)
unmeasured(
    "heads-redundant",
    CHAPTER,
    "Sources of Inefficiency: Redundancy Among Heads",
    "some heads learn the same patterns and could be removed",
    why=TRAINED,
    undecided=True,
)
unmeasured(
    "multi-head-quality",
    CHAPTER,
    "Comparison and Key Points",
    "multi-head attention makes better models at the same asymptotic cost",
    why=TRAINED,
    undecided=True,
)
