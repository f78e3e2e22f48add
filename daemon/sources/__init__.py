"""Where models come from: a Python package index, the Hugging Face hub, this machine's disk."""
