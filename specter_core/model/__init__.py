"""The shared instance: what draft and target have in common, held once."""
