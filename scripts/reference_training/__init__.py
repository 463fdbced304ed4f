"""Training of the small reference models: corpus, tokenizer, MoE decoders, export to Hugging Face format."""
