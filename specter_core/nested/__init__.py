"""Nested experts: the BF16 expert is the resident INT4 code plus a residual; slots, link and host store carry residuals."""
