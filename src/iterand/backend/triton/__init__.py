"""The four operations of `iterand.backend.reference` as Triton kernels for CUDA.

    cuts.FindCuts         reference.find_cuts       kernels in bracket.py and radix_select.py
    masks.ApplyMasks      reference.apply_mask
    masks.UpdateScores    reference.update_scores
    redraw.Redraw         reference.redraw

Each works on all layers of a model at once, without a host sync, and its results are bit-equal to the reference.
"""
