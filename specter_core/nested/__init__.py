"""Nested experts: a BF16 expert is its resident INT4 code plus a residual, which slots, link and host store carry."""
