"""Section 4 and Appendix A of the paper as code: the claims, the exact probabilities, and the construction."""
