"""Training of the small reference models: corpus, tokenizer, trainable MoE decoders, export to Hugging Face format."""
