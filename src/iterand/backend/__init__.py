"""The four operations of a search step: find the cuts, apply the masks, update the scores, redraw."""
