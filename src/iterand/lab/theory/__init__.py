"""Section 4 and Appendix A of the paper as code: what is claimed, what is true, and the construction itself."""
