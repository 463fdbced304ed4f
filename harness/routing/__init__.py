"""Figure 13: what models route to on real prompts (sweep=routing, scripts/routing_statistics.py)."""
